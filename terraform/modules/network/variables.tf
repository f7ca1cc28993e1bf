# SPDX-License-Identifier: Apache-2.0

variable "vpc_id" {
  description = "VPC of the engines."
  type        = string

  validation {
    condition     = startswith(var.vpc_id, "vpc-")
    error_message = "`vpc_id` begins with vpc-."
  }
}

variable "route_table_ids" {
  description = "Route tables of the engines' subnets."
  type        = list(string)

  validation {
    condition     = length(var.route_table_ids) > 0
    error_message = "`route_table_ids` names one table or more: without a route the endpoint is of no use."
  }
}

variable "corpora" {
  description = "The `corpus` outputs of the buckets that may be reached, all in this region."
  type = list(object({
    name        = string
    arn         = string
    region      = string
    prefix      = string
    kms_key_arn = string
  }))

  validation {
    condition     = length(var.corpora) > 0
    error_message = "`corpora` names one bucket or more."
  }
}

variable "other_bucket_arns" {
  description = "Further buckets that hosts of this VPC read, such as those that a container registry or a package mirror of the region keeps its layers in: the endpoint takes all of the VPC's S3 traffic of the region, and what is not named is refused."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.other_bucket_arns : can(regex("^arn:[a-z-]+:s3:::[a-z0-9.-]+$", arn))])
    error_message = "`other_bucket_arns` are ARNs of whole buckets, without a path and without *."
  }
}

variable "principal_account_ids" {
  description = "Accounts whose principals reach the corpora through the endpoint; empty: this one."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for id in var.principal_account_ids : can(regex("^[0-9]{12}$", id))])
    error_message = "`principal_account_ids` are account ids of twelve digits."
  }
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}
