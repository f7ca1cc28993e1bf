# SPDX-License-Identifier: Apache-2.0

output "corpus" {
  description = "The bucket, as the modules take it."
  value       = module.corpus.corpus
}

output "ec_transfer_config" {
  description = "For each role the JSON that `vllm serve --ec-transfer-config` takes."
  value       = module.corpus.ec_transfer_config
}

output "engine_role_arn" {
  description = "Role of the engines, for the annotation eks.amazonaws.com/role-arn of a service account of `irsa`; null where nobody was named who may take it."
  value       = module.engines.role_arn
}

output "maintainer_role_arn" {
  description = "Role that deletes; null without `maintainer_arns`."
  value       = module.maintainer.role_arn
}

output "engine_policy_arn" {
  description = "Policy of the engines, for a role of yours."
  value       = module.engines.policy_arn
}

output "vpc_endpoint_ids" {
  description = "Endpoints that the corpus is read through."
  value       = local.vpc_endpoint_ids
}

output "interface_endpoint_url" {
  description = "What engines beyond the VPC set as `endpoint_url` where S3's own names do not lead to the interface endpoint; null without one."
  value       = one(module.network[*].interface_endpoint_url)
}

output "alarm_names" {
  description = "Names of all alarms."
  value       = module.observability.alarm_names
}
