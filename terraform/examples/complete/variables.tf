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

variable "vpc_id" {
  description = "VPC of the engines."
  type        = string
}

variable "route_table_ids" {
  description = "Route tables of the engines' subnets."
  type        = list(string)
}

variable "organization_id" {
  description = "Organisation whose principals alone may use the bucket, such as o-a1b2c3d4e5; null: no such limit."
  type        = string
  default     = null
}

variable "irsa" {
  description = "Service accounts of the engines, as the access module takes them."
  type = list(object({
    provider_arn    = string
    issuer          = string
    namespace       = string
    service_account = string
  }))
  default = []
}

variable "maintainer_arns" {
  description = "ARNs of the roles that may clean up with `s3ec rm` and `gc`, from anywhere."
  type        = list(string)
  default     = []
}

variable "alarm_actions" {
  description = "ARNs that are told of an alarm."
  type        = list(string)
  default     = []
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = { Project = "s3ec" }
}
