# SPDX-License-Identifier: Apache-2.0

variable "name" {
  description = "Name of the policy and of the role."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z0-9+=,.@_-]{1,64}$", var.name))
    error_message = "`name` has 1 to 64 of letters, digits and +=,.@_-, as IAM wants it."
  }
}

variable "role" {
  description = "`consumer` reads. `producer` reads and adds, and deletes nothing. `maintainer` also deletes, for `s3ec rm`, `gc` and `manifest rebuild`; give it to people and jobs, not to engines."
  type        = string

  validation {
    condition     = contains(["consumer", "producer", "maintainer"], var.role)
    error_message = "`role` is consumer, producer or maintainer."
  }
}

variable "corpora" {
  description = "The `corpus` outputs of the buckets that the role uses as home: what is written, goes there."
  type = list(object({
    name        = string
    arn         = string
    region      = string
    prefix      = string
    kms_key_arn = string
  }))

  validation {
    condition     = length(var.corpora) > 0
    error_message = "`corpora` names one bucket or more."
  }

  validation {
    condition     = alltrue([for corpus in var.corpora : corpus.prefix == "" || endswith(corpus.prefix, "/")])
    error_message = "Each `prefix` is empty or ends with a slash: without it `team-a` would also cover `team-ab`."
  }
}

variable "replicas" {
  description = "The `corpus` outputs of the buckets that are read before home. With `fill`, as in the settings, the role also adds to them what it fetched from home. A `maintainer` deletes in them too."
  type = list(object({
    name        = string
    arn         = string
    region      = string
    prefix      = string
    kms_key_arn = string
    fill        = optional(bool, false)
  }))
  default = []

  validation {
    condition     = alltrue([for corpus in var.replicas : corpus.prefix == "" || endswith(corpus.prefix, "/")])
    error_message = "Each `prefix` is empty or ends with a slash: without it `team-a` would also cover `team-ab`."
  }
}

variable "existing_role_name" {
  description = "Name of a role that exists and gets the policy; null: a role is made for those whom the next variables name."
  type        = string
  default     = null
}

variable "irsa" {
  description = "Kubernetes service accounts that take the role through the cluster's OIDC provider. `issuer` is the provider's URL without https://."
  type = list(object({
    provider_arn    = string
    issuer          = string
    namespace       = string
    service_account = string
  }))
  default = []

  validation {
    condition     = alltrue([for one in var.irsa : !startswith(one.issuer, "https://")])
    error_message = "`issuer` is written without https://, as IAM's condition keys are."
  }

  validation {
    condition     = alltrue([for one in var.irsa : !strcontains("${one.namespace}${one.service_account}", "*")])
    error_message = "`namespace` and `service_account` name one account; a * would let every pod in."
  }
}

variable "pod_identity" {
  description = "Kubernetes service accounts that EKS Pod Identity hands the role to, of one `cluster` or, unset, of each of this account's; the association is made beside the cluster, with session tags, which are how it tells the pod."
  type = list(object({
    namespace       = string
    service_account = string
    cluster         = optional(string)
  }))
  default = []

  validation {
    condition     = alltrue([for one in var.pod_identity : !strcontains("${one.namespace}${one.service_account}", "*")])
    error_message = "`namespace` and `service_account` name one account; a * would let every pod in."
  }
}

variable "assume_role_arns" {
  description = "ARNs of roles and users that may take the role: people, and jobs outside of Kubernetes and EC2."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.assume_role_arns : can(regex("^arn:[a-z-]+:iam::[0-9]{12}:(role|user)/[^*]+$", arn))])
    error_message = "`assume_role_arns` are ARNs of single roles or users, without *."
  }
}

variable "instance_profile" {
  description = "Let EC2 instances take the role, and make an instance profile. Not for a `maintainer`."
  type        = bool
  default     = false
}

variable "permissions_boundary" {
  description = "ARN of the policy that bounds the role. Null: none."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}
