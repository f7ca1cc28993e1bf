# SPDX-License-Identifier: Apache-2.0

variable "home" {
  description = "The `corpus` output of the bucket that is written to, deleted from, and whose index counts."
  type = object({
    name         = string
    region       = string
    prefix       = string
    endpoint_url = optional(string)
    ca_bundle    = optional(string)
  })
}

variable "replicas" {
  description = "The `corpus` outputs of the buckets that are read before home, in this order: first the one of the engines' own region. With `fill` engines put there what they had to fetch from home."
  type = list(object({
    name         = string
    region       = string
    prefix       = string
    endpoint_url = optional(string)
    ca_bundle    = optional(string)
    fill         = optional(bool, false)
  }))
  default = []
}
