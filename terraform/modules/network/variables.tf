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

variable "restrict_to_corpora" {
  description = "Let nothing through but `corpora` and `other_bucket_arns`. The endpoint takes all S3 traffic of these route tables, so what else is needed there (layers of container images, mirrors of packages) must be named first."
  type        = bool
  default     = false
}

variable "corpora" {
  description = "With `restrict_to_corpora`: the `corpus` outputs of the buckets that may be reached, all in this region."
  type = list(object({
    name        = string
    arn         = string
    region      = string
    prefix      = string
    kms_key_arn = string
  }))
  default = []
}

variable "other_bucket_arns" {
  description = "With `restrict_to_corpora`: further buckets that hosts of this VPC read, such as those that a container registry or a package mirror of the region keeps its layers in."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.other_bucket_arns : can(regex("^arn:[a-z-]+:s3:::[a-z0-9.-]+$", arn))])
    error_message = "`other_bucket_arns` are ARNs of whole buckets, without a path and without *."
  }
}

variable "principal_account_ids" {
  description = "With `restrict_to_corpora`: accounts whose principals reach the corpora through the endpoint; empty: this one."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for id in var.principal_account_ids : can(regex("^[0-9]{12}$", id))])
    error_message = "`principal_account_ids` are account ids of twelve digits."
  }
}

variable "interface" {
  description = <<-EOT
    An interface endpoint beside the gateway, which costs by the hour and by the byte: for engines
    that come over a VPN, Direct Connect or peering, which a gateway does not serve. Null: none. The
    security groups let them in on port 443. With `private_dns` S3's own names lead here whoever asks
    the inbound endpoint of the VPC's resolver.
  EOT
  type = object({
    subnet_ids         = list(string)
    security_group_ids = list(string)
    private_dns        = optional(bool, false)
  })
  default = null

  validation {
    condition     = var.interface == null || try(length(var.interface.subnet_ids) > 0 && length(var.interface.security_group_ids) > 0, false)
    error_message = "`interface` names one subnet and one security group or more."
  }
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}
