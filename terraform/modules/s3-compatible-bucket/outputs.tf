# SPDX-License-Identifier: Apache-2.0

output "corpus" {
  description = "The bucket, in the shape that the corpus-bucket module has, and how its store is reached."
  value       = local.corpus
}

output "ec_transfer_config" {
  description = "For each role the JSON that `vllm serve --ec-transfer-config` takes, for this bucket alone. The transfer-config module adds replicas."
  value       = module.transfer_config.ec_transfer_config
}
