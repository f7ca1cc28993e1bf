# SPDX-License-Identifier: Apache-2.0

variable "region" {
  description = "Region of the bucket."
  type        = string
  default     = "eu-central-1"
}

variable "bucket" {
  description = "Name of the bucket, unique in its partition."
  type        = string
}

variable "prefix" {
  description = "Folder of the corpus, with its trailing slash; empty for the whole bucket."
  type        = string
  default     = "corpus/"
}

variable "maintainer_arns" {
  description = "ARNs of the roles and users that may clean up with `s3ec rm` and `gc`. Empty: there is the policy, and nobody has it."
  type        = list(string)
  default     = []
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete a bucket that still holds a corpus."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = { Project = "s3ec" }
}
