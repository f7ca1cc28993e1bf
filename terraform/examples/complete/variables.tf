# SPDX-License-Identifier: Apache-2.0

variable "name" {
  description = "Name of the bucket, unique in its partition, and beginning of the other names."
  type        = string
}

variable "region" {
  description = "Region of everything."
  type        = string
  default     = "eu-central-1"
}

variable "prefix" {
  description = "Folder of the corpus, with its trailing slash; empty for the whole bucket."
  type        = string
  default     = "corpus/"
}

variable "log_days" {
  description = "Days that access logs are kept."
  type        = number
  default     = 90
}

variable "existing" {
  description = <<-EOT
    What is there already, and is then not made: the `bucket`, whose policy, encryption and versions
    stay as they are (`kms_key_arn`: the key of its default encryption); `vpc_endpoint_ids` that the
    corpus is read through; `engine_role_name`, a role that gets the engines' policy.
  EOT
  type = object({
    bucket           = optional(string)
    kms_key_arn      = optional(string)
    vpc_endpoint_ids = optional(list(string), [])
    engine_role_name = optional(string)
  })
  default = {}

  validation {
    condition     = var.existing.bucket != null || var.existing.kms_key_arn == null
    error_message = "`kms_key_arn` is of an existing `bucket`; a bucket that is made gets a key of its own."
  }
}

variable "cold_namespaces" {
  description = "Namespaces (`s3ec ns` lists them) whose embeddings S3 moves to INTELLIGENT_TIERING after 30 days."
  type        = list(string)
  default     = []
}

variable "vpc_id" {
  description = "VPC of the engines; without meaning for existing endpoints."
  type        = string
  default     = null
}

variable "route_table_ids" {
  description = "Route tables of the engines' subnets; likewise."
  type        = list(string)
  default     = []
}

variable "interface_endpoint" {
  description = "An interface endpoint beside the gateway, for engines beyond the VPC, as the network module takes it; null: none."
  type        = object({ subnet_ids = list(string), security_group_ids = list(string), private_dns = optional(bool, false) })
  default     = null
}

variable "restrict_to_corpora" {
  description = "Let the endpoints pass the corpus and the layers of the region's container registry only: nothing else of S3 is reached from these route tables any more."
  type        = bool
  default     = false
}

variable "organization_id" {
  description = "Organisation whose principals alone may use the bucket, such as o-a1b2c3d4e5; null: no such limit."
  type        = string
  default     = null
}

variable "irsa" {
  description = "Service accounts of the engines that take their role through the cluster's OIDC provider, as the access module takes them."
  type = list(object({
    provider_arn    = string
    issuer          = string
    namespace       = string
    service_account = string
  }))
  default = []
}

variable "pod_identity" {
  description = "Service accounts of the engines that EKS Pod Identity hands their role to, in clusters of this region that have its agent; the associations are made."
  type        = list(object({ cluster = string, namespace = string, service_account = string }))
  default     = []
}

variable "maintainer_arns" {
  description = "ARNs of the roles that may clean up with `s3ec rm` and `gc`, from anywhere."
  type        = list(string)
  default     = []
}

variable "alarm_actions" {
  description = "ARNs that get a message about an alarm."
  type        = list(string)
  default     = []
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = { Project = "s3ec" }
}
