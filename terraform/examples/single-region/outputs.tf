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
  description = "Instance profile by role: consumer, producer."
  value       = { for role, access in module.access : role => access.instance_profile_name if access.instance_profile_name != null }
}

output "maintainer_role_arn" {
  description = "ARN of the role that deletes; null where `maintainer_arns` is empty."
  value       = module.access["maintainer"].role_arn
}

output "policy_arns" {
  description = "ARN of the policy by role, for roles that exist already."
  value       = { for role, access in module.access : role => access.policy_arn }
}

output "policies" {
  description = "What each role may do, as IAM has it."
  value       = { for role, access in module.access : role => access.policy_json }
}
