# SPDX-License-Identifier: Apache-2.0

variable "name" {
  description = "Begins the name of everything, the buckets' too, so it must be unique in its partition."
  type        = string
}

variable "writer_region" {
  description = "Region that embeddings are written in."
  type        = string
  default     = "eu-central-1"
}

variable "reader_regions" {
  description = "The two regions that only read. A third takes one provider, one `reader` and one `key` more in main.tf: a provider cannot be made in a loop."
  type        = object({ us = string, ap = string })
  default     = { us = "us-east-1", ap = "ap-southeast-1" }

  validation {
    condition     = var.reader_regions.us != var.reader_regions.ap
    error_message = "`reader_regions` are two regions."
  }
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
  description = "ARNs that are told of an alarm, in the writer's region."
  type        = list(string)
  default     = []
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = { Project = "s3ec" }
}
