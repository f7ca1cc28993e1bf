# SPDX-License-Identifier: Apache-2.0

output "role_arn" {
  description = "ARN of the role that S3 replicates with."
  value       = aws_iam_role.this.arn
}

output "rules" {
  description = "Rule ids: names of the destinations, as CloudWatch's dimension RuleId has them."
  value       = local.names
}

output "policy_json" {
  description = "What the role may do."
  value       = aws_iam_role_policy.this.policy
}

output "statements" {
  description = "The policy's statements as objects: a plan shows of them what it knows, and of `policy_json` nothing as long as a key has no ARN."
  value       = local.statements
}
