# SPDX-License-Identifier: Apache-2.0

variable "name" {
  description = "Name of the bucket."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.name))
    error_message = "`name` has 3 to 63 of a-z, 0-9 and '-'. A dot would break TLS host names, so it is refused."
  }
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

variable "endpoint_url" {
  description = "URL of the store as the engines reach it; goes into the settings."
  type        = string

  validation {
    condition     = can(regex("^https?://[^/]+$", var.endpoint_url))
    error_message = "`endpoint_url` is http:// or https://, a host and perhaps a port, without a path."
  }
}

variable "ca_bundle" {
  description = "Path, on the engines' hosts, of the PEM file that signs the store's certificate. Null: the system's authorities."
  type        = string
  default     = null
}

variable "versioning" {
  description = "Keep versions of what is deleted or replaced. Without a lifecycle rule they stay for good."
  type        = bool
  default     = false
}

variable "policy_json" {
  description = "Bucket policy; null for none. MinIO gives rights to users by its own policies, Ceph and SeaweedFS may want one here."
  type        = string
  default     = null

  validation {
    condition     = var.policy_json == null || can(jsondecode(var.policy_json).Statement)
    error_message = "`policy_json` is a policy document: JSON with a `Statement`."
  }
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete a bucket that still holds a corpus."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of the bucket. Not every store keeps them."
  type        = map(string)
  default     = {}
}
