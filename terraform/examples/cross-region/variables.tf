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

variable "alarm_actions" {
  description = "ARNs that are told of an alarm, in the writer's region."
  type        = list(string)
  default     = []
}
