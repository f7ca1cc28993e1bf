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
  description = "Role of the engines, for the annotation eks.amazonaws.com/role-arn of their service account; null without `irsa`."
  value       = module.engines.role_arn
}

output "maintainer_role_arn" {
  description = "Role that deletes; null without `maintainer_arns`."
  value       = module.maintainer.role_arn
}

output "vpc_endpoint_id" {
  description = "Endpoint that the corpus is read through."
  value       = module.network.vpc_endpoint_id
}

output "alarm_names" {
  description = "Names of all alarms."
  value       = module.observability.alarm_names
}
