# SPDX-License-Identifier: Apache-2.0
# What engines are told: where home is, and which copies they read before it. No resource is made.

locals {
  places = concat([var.home], var.replicas)

  # s3ec asks for a word before it sends embeddings over a network in clear.
  in_clear = anytrue([
    for place in local.places :
    place.endpoint_url != null && can(regex("^http://", place.endpoint_url))
    && !can(regex("^http://(127\\.|localhost|\\[::1\\])", place.endpoint_url))
  ])

  # What is said of each place. No key is: a bucket's default encryption knows its own, and the key of
  # home could not encrypt in another region.
  said = [
    for place in local.places : merge(
      { bucket = place.name, region = place.region },
      place.endpoint_url == null ? {} : { endpoint_url = place.endpoint_url },
      place.ca_bundle == null ? {} : { ca_bundle = place.ca_bundle },
    )
  ]

  replicas = [
    for index, replica in var.replicas : merge(
      local.said[index + 1],
      replica.fill ? { fill = true } : {},
    )
  ]

  settings = merge(
    local.said[0],
    var.home.prefix == "" ? {} : { prefix = trimsuffix(var.home.prefix, "/") },
    local.in_clear ? { allow_http = true } : {},
    length(local.replicas) == 0 ? {} : { replicas = local.replicas },
  )
}
