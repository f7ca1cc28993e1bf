# SPDX-License-Identifier: Apache-2.0

variable "name" {
  description = "Begins the name of everything, the buckets' too, so it must be unique in its partition."
  type        = string
}

variable "home_region" {
  description = "Region that embeddings are written in, and whose index counts."
  type        = string
  default     = "us-east-1"
}

variable "near_region" {
  description = "Region whose engines have a bucket of their own before home."
  type        = string
  default     = "eu-central-1"
}

variable "prefix" {
  description = "Folder of the corpus, with its trailing slash; empty for the whole bucket."
  type        = string
  default     = "corpus/"
}

variable "pods" {
  description = "Service accounts of the engines, in clusters of both regions."
  type        = list(object({ namespace = string, service_account = string, cluster = optional(string) }))
  default     = [{ namespace = "serving", service_account = "vllm" }]
}

variable "maintainer_pods" {
  description = "Service accounts of the jobs that clean up with `s3ec rm` and `gc`."
  type        = list(object({ namespace = string, service_account = string, cluster = optional(string) }))
  default     = [{ namespace = "serving", service_account = "s3ec-maintainer" }]
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = { Project = "s3ec" }
}
