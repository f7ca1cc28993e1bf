# SPDX-License-Identifier: Apache-2.0

output "corpus" {
  description = "The bucket, as the modules take it."
  value       = module.corpus.corpus
}

output "ec_transfer_config" {
  description = "For each role the JSON that `vllm serve --ec-transfer-config` takes."
  value       = module.corpus.ec_transfer_config
}

output "instance_profiles" {
  description = "Instance profile by role: consumer, producer, maintainer."
  value       = { for role, access in module.access : role => access.instance_profile_name }
}

output "policies" {
  description = "What each role may do, as IAM has it."
  value       = { for role, access in module.access : role => access.policy_json }
}
