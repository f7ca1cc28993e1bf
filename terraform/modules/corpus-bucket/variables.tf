# SPDX-License-Identifier: Apache-2.0

variable "name" {
  description = "Name of the bucket, unique in its partition."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.name))
    error_message = "`name` has 3 to 63 of a-z, 0-9 and '-'. A dot would break TLS host names, so it is refused."
  }
}

variable "create" {
  description = "Make the bucket and all about it. With false the bucket `name` is there already, with its own policy, encryption and versions: it is looked up, left as it is, and handed on as `corpus`."
  type        = bool
  default     = true
}

variable "prefix" {
  description = "Folder of the corpus inside the bucket, with its trailing slash; empty for the whole bucket."
  type        = string
  default     = ""

  validation {
    condition     = var.prefix == "" || can(regex("^([A-Za-z0-9._-]+/)+$", var.prefix))
    error_message = "`prefix` is empty, or folders that each end with a slash, such as \"team-a/corpus/\": without the slash `team-a` would also cover `team-ab`."
  }
}

variable "kms_key_arn" {
  description = "ARN of the KMS key that encrypts new objects, with a bucket key; of an existing bucket the key of its default encryption. Null: SSE-S3, or the key of `create_kms_key`."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/", var.kms_key_arn))
    error_message = "`kms_key_arn` is the full ARN of a key, not an alias: replication and policies need the key itself."
  }
}

variable "create_kms_key" {
  description = "Make a KMS key for the bucket, which rotates, with the alias alias/NAME."
  type        = bool
  default     = false
}

variable "key_deletion_days" {
  description = "Days between the order to delete that key and its end, 7 to 30. Without its key a corpus cannot be read, and until then the order can be taken back."
  type        = number
  default     = 30

  validation {
    condition     = var.key_deletion_days >= 7 && var.key_deletion_days <= 30
    error_message = "`key_deletion_days` is 7 to 30, as KMS wants it."
  }
}

variable "account_access" {
  description = <<-EOT
    What other accounts may do with the corpus, by account id: `read`, `add`, `delete`, and
    `replicate`, which is to be the target of their replication. It counts for those roles that
    their own account lets do so, as the access and replication modules do. A key that the module
    did not make has to let them use it by its own policy.
  EOT
  type        = map(set(string))
  default     = {}

  validation {
    condition     = alltrue([for id in keys(var.account_access) : can(regex("^[0-9]{12}$", id))])
    error_message = "`account_access` is by account ids of twelve digits."
  }

  validation {
    condition = alltrue([
      for rights in values(var.account_access) :
      length(rights) > 0 && length(setsubtract(rights, ["read", "add", "delete", "replicate"])) == 0
    ])
    error_message = "Rights in `account_access` are one or more of read, add, delete and replicate."
  }
}

variable "write_once" {
  description = "Refuse writes of embeddings, records and manifest files without If-None-Match, so that who may write can add but not replace."
  type        = bool
  default     = true
}

variable "lifecycle_rules" {
  description = <<-EOT
    What S3 removes or moves by itself; null leaves the bucket without a lifecycle configuration.
    `abort_uploads_days`: incomplete multipart uploads. `noncurrent_days`: versions that were deleted
    or replaced. `folders`: what is there, below each `prefix`, is deleted after `expire_days` or
    moved to INTELLIGENT_TIERING after `intelligent_tiering_days`. A folder is `objects/` of one
    namespace (`s3ec ns` lists them), such as corpus/NAMESPACE/objects/, or `logs/`: S3's filters
    cannot leave anything out, and a manifest must neither expire nor move.
  EOT
  type = object({
    abort_uploads_days = optional(number, 7)
    noncurrent_days    = optional(number, 30)
    folders = optional(list(object({
      prefix                   = string
      expire_days              = optional(number)
      intelligent_tiering_days = optional(number)
    })), [])
  })
  default = {}

  validation {
    condition = var.lifecycle_rules == null || alltrue([
      for days in flatten([
        try([var.lifecycle_rules.abort_uploads_days, var.lifecycle_rules.noncurrent_days], []),
        [for one in try(var.lifecycle_rules.folders, []) : [one.expire_days, one.intelligent_tiering_days]],
      ]) : days == null || (try(days >= 0, false) && try(floor(days) == days, false))
    ])
    error_message = "`lifecycle_rules` counts whole days, 0 or more."
  }

  validation {
    condition = alltrue([
      for one in try(var.lifecycle_rules.folders, []) :
      can(regex("(^|/)objects/$", one.prefix)) || one.prefix == "logs/"
    ])
    error_message = "`prefix` of a folder ends with objects/, or is logs/: a rule that covers a manifest would take a corpus from its readers."
  }
}

variable "network_access" {
  description = <<-EOT
    Refuse reading, writing and deleting of objects, whatever other policies allow, to whoever does
    not come through one of these VPC endpoints. Null: from anywhere. `exempt_role_arns` are roles
    that come from elsewhere, such as the one that S3 replicates with, in the source's bucket and in
    each destination's.
  EOT
  type = object({
    vpc_endpoint_ids = list(string)
    exempt_role_arns = optional(list(string), [])
  })
  default = null

  validation {
    condition     = var.network_access == null || try(length(var.network_access.vpc_endpoint_ids) > 0, false)
    error_message = "`network_access` names one endpoint or more in `vpc_endpoint_ids`: with none nobody could read the bucket. Null is no limit."
  }
}

variable "additional_policy_statements" {
  description = <<-EOT
    Statements for the bucket's policy beside those that the module writes, such as one that refuses
    whoever is not of the organisation. `principals` is by type, such as { AWS = ["arn:..."] }; unset
    it is everybody, which only a Deny may say. `resources` unset: the bucket and all in it.
    `conditions` is by operator and key.
  EOT
  type = list(object({
    sid        = string
    effect     = string
    principals = optional(map(list(string)))
    actions    = list(string)
    resources  = optional(list(string))
    conditions = optional(map(map(list(string))), {})
  }))
  default = []

  validation {
    condition     = alltrue([for one in var.additional_policy_statements : contains(["Allow", "Deny"], one.effect)])
    error_message = "`effect` of a statement is Allow or Deny."
  }

  validation {
    condition = alltrue([
      for one in var.additional_policy_statements :
      can(regex("^[A-Za-z0-9]+$", one.sid))
      && !can(regex("^(Deny(PlainHttp|OldTls|Replacing|OtherNetworks)|(List|Objects|Versioning)[0-9]+)$", one.sid))
    ]) && length(distinct(var.additional_policy_statements[*].sid)) == length(var.additional_policy_statements)
    error_message = "`sid` is letters and digits, once each, and none that the module writes itself (DenyPlainHttp, DenyOldTls, DenyReplacing, DenyOtherNetworks; List, Objects, Versioning with an account id)."
  }

  validation {
    condition = alltrue([
      for one in var.additional_policy_statements :
      length(one.actions) > 0 && alltrue([for action in one.actions : startswith(action, "s3:")])
    ])
    error_message = "`actions` of a statement are one or more of s3:..."
  }

  validation {
    condition = alltrue([
      for one in var.additional_policy_statements : one.effect != "Allow" || (
        one.principals != null
        && (length(one.conditions) > 0 || !contains(flatten(values(one.principals == null ? {} : one.principals)), "*"))
      )
    ])
    error_message = "A statement that allows names its `principals`; * is one only together with `conditions`."
  }
}

variable "access_log" {
  description = "Bucket and prefix that S3 writes access logs to; the target's policy must allow logging.s3.amazonaws.com. Null: no access log."
  type = object({
    bucket = string
    prefix = optional(string, "")
  })
  default = null
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete a bucket that still holds a corpus."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}
