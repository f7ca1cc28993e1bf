# SPDX-License-Identifier: Apache-2.0

variable "name" {
  description = "Begins the name of each alarm."
  type        = string
}

variable "corpus" {
  description = "The `corpus` output of the bucket to watch, in this region; of replicated ones the source."
  type = object({
    name        = string
    arn         = string
    region      = string
    prefix      = string
    kms_key_arn = string
  })
}

variable "destinations" {
  description = "Names of the destination buckets by rule id, as the replication module was given them; empty without replication."
  type        = map(string)
  default     = {}
}

variable "alarm_actions" {
  description = "ARNs that get a message at the start and end of an alarm, such as an SNS topic."
  type        = list(string)
  default     = []
}

variable "replication_latency_s" {
  description = "Alarm when replication lags by more, in seconds, for 15 minutes."
  type        = number
  default     = 900

  validation {
    condition     = var.replication_latency_s > 0
    error_message = "`replication_latency_s` is more than 0."
  }
}

variable "request_alarms" {
  description = "Turn on the bucket's request metrics, which cost money, and alarm on answers 4xx and 5xx. 404 is not alarming: s3ec asks for what may be absent, so 4xx counts beside all requests."
  type        = bool
  default     = true
}

variable "client_error_share" {
  description = "Share of requests answered with 4xx that is alarming, 0 to 1, over 15 minutes."
  type        = number
  default     = 0.2

  validation {
    condition     = var.client_error_share > 0 && var.client_error_share <= 1
    error_message = "`client_error_share` is a share: more than 0, at most 1."
  }
}

variable "server_error_share" {
  description = "Share of requests answered with 5xx that is alarming, 0 to 1, over 15 minutes."
  type        = number
  default     = 0.01

  validation {
    condition     = var.server_error_share > 0 && var.server_error_share <= 1
    error_message = "`server_error_share` is a share: more than 0, at most 1."
  }
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}
