# SPDX-License-Identifier: Apache-2.0

output "corpus" {
  description = "The bucket, in the shape that the modules take."
  value       = module.corpus.corpus
}

output "ec_transfer_config" {
  description = "For each role the JSON that `vllm serve --ec-transfer-config` takes."
  value       = module.corpus.ec_transfer_config
}
