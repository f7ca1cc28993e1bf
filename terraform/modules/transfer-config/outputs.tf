# SPDX-License-Identifier: Apache-2.0

output "ec_transfer_config" {
  description = "For each role the JSON that `vllm serve --ec-transfer-config` takes."
  value = {
    for role in ["ec_producer", "ec_consumer", "ec_both"] : role => jsonencode({
      ec_connector              = "S3ECConnector"
      ec_role                   = role
      ec_connector_extra_config = local.settings
    })
  }

  precondition {
    condition     = alltrue([for replica in var.replicas : replica.prefix == var.home.prefix])
    error_message = "A name is the same in each place, so all replicas need the same `prefix` as home (\"${var.home.prefix}\")."
  }

  precondition {
    condition     = length(distinct([for place in local.said : jsonencode([place.bucket, lookup(place, "endpoint_url", "")])])) == length(local.said)
    error_message = "A bucket is named twice among home and `replicas`; home is read last by itself."
  }
}
