# SPDX-License-Identifier: Apache-2.0

variable "endpoint_url" {
  description = "URL of the store, for Terraform and for the engines."
  type        = string
  default     = "https://localhost:9000"
}

variable "bucket" {
  description = "Name of the bucket."
  type        = string
  default     = "embeddings"
}

variable "prefix" {
  description = "Folder of the corpus, with its trailing slash; empty for the whole bucket."
  type        = string
  default     = ""
}

variable "ca_bundle" {
  description = "PEM file of the authority that signed the store's certificate; null: the system's authorities."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of the bucket. Not every store keeps them."
  type        = map(string)
  default     = {}
}
