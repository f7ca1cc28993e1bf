# SPDX-License-Identifier: Apache-2.0

variable "name" {
  description = "Name of the role that S3 replicates with."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z0-9+=,.@_-]{1,64}$", var.name))
    error_message = "`name` has 1 to 64 of letters, digits and +=,.@_-, as IAM wants it."
  }
}

variable "source_corpus" {
  description = "The `corpus` output of the bucket that is written to. It needs versioning."
  type = object({
    name        = string
    arn         = string
    region      = string
    prefix      = string
    kms_key_arn = string
  })
}

variable "destinations" {
  description = "The `corpus` outputs of the buckets that are read from, by a name for each. They need versioning, and where `account_id` is another account's a policy of bucket and key that lets this one `replicate` (`account_access` of the corpus-bucket module)."
  type = map(object({
    name        = string
    arn         = string
    region      = string
    prefix      = string
    kms_key_arn = string
    account_id  = optional(string)
  }))

  validation {
    condition     = length(var.destinations) > 0
    error_message = "`destinations` names one bucket or more."
  }

  validation {
    condition     = length(distinct([for corpus in values(var.destinations) : corpus.region])) == length(var.destinations)
    error_message = "Two destinations are in the same region; one bucket serves a region."
  }
}

variable "delete_markers" {
  description = "Replicate deletions, so that what `s3ec rm` and `gc` delete goes away everywhere. Deletions by a lifecycle rule are never replicated: give each bucket its own rule."
  type        = bool
  default     = true
}

variable "batch_copy" {
  description = "Make a role for S3 Batch Operations, and the request (`batch_copy_job`) that copies what was there before the rules."
  type        = bool
  default     = false
}

variable "time_control" {
  description = "Pay for replication within 15 minutes (S3 RTC). Metrics are on either way."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}
