# SPDX-License-Identifier: Apache-2.0

variable "name" {
  description = "Begins the name of everything, the buckets' too, so it must be unique in its partition."
  type        = string
}

variable "home_region" {
  description = "Region that embeddings are written in, and whose index counts."
  type        = string
  default     = "eu-central-1"
}

variable "replica_regions" {
  description = "The two regions that read a copy of their own. A third takes one provider, one bucket and one role more in main.tf: a provider cannot be made in a loop."
  type        = object({ us = string, ap = string })
  default     = { us = "us-east-1", ap = "ap-southeast-1" }

  validation {
    condition     = var.replica_regions.us != var.replica_regions.ap
    error_message = "`replica_regions` are two regions."
  }
}

variable "account_role_arns" {
  description = "Role of another account that Terraform takes to make a region's bucket and engines' role there; unset: this account."
  type        = object({ us = optional(string), ap = optional(string) })
  default     = {}
}

variable "writers" {
  description = "Regions (home, us, ap) whose engines also encode and save. They save to home, wherever they are."
  type        = set(string)
  default     = ["home"]

  validation {
    condition     = length(setsubtract(var.writers, ["home", "us", "ap"])) == 0
    error_message = "`writers` are of home, us and ap."
  }
}

variable "existing_buckets" {
  description = "Buckets that are there already, by home, us or ap. They need versioning, and keep their policy and encryption; `kms_key_arn` is the key of their default encryption. Replication replaces the rules that home has."
  type        = map(object({ name = string, kms_key_arn = optional(string) }))
  default     = {}

  validation {
    condition     = length(setsubtract(keys(var.existing_buckets), ["home", "us", "ap"])) == 0
    error_message = "`existing_buckets` are by home, us and ap."
  }
}

variable "batch_copy" {
  description = "Make what copies the objects that home had before its rules: see `batch_copy_job`."
  type        = bool
  default     = false
}

variable "prefix" {
  description = "Folder of the corpus, with its trailing slash; empty for the whole bucket."
  type        = string
  default     = "corpus/"
}

variable "pods" {
  description = "Service accounts of the engines, in clusters of any region."
  type        = list(object({ namespace = string, service_account = string, cluster = optional(string) }))
  default     = [{ namespace = "serving", service_account = "vllm" }]
}

variable "maintainer_pods" {
  description = "Service accounts of the jobs that clean up with `s3ec rm` and `gc`."
  type        = list(object({ namespace = string, service_account = string, cluster = optional(string) }))
  default     = [{ namespace = "serving", service_account = "s3ec-maintainer" }]
}

variable "key_deletion_days" {
  description = "Days between the order to delete a key and its end, 7 to 30. Without its key a corpus cannot be read, and until then the order can be taken back."
  type        = number
  default     = 30

  validation {
    condition     = var.key_deletion_days >= 7 && var.key_deletion_days <= 30
    error_message = "`key_deletion_days` is 7 to 30, as KMS wants it."
  }
}

variable "alarm_actions" {
  description = "ARNs that get a message about an alarm, in home's region."
  type        = list(string)
  default     = []
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = { Project = "s3ec" }
}
