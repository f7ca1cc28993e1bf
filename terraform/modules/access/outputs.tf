# SPDX-License-Identifier: Apache-2.0

output "policy_arn" {
  description = "ARN of the policy, for roles that exist already."
  value       = aws_iam_policy.this.arn
}

output "policy_json" {
  description = "The policy itself."
  value       = aws_iam_policy.this.policy
}

output "statements" {
  description = "The policy's statements as objects: a plan shows of them what it knows, and of `policy_json` nothing as long as a key has no ARN."
  value       = local.statements
}

output "role_arn" {
  description = "ARN of the role, made or existing; null where nobody was named who may take it."
  value       = var.existing_role_name == null ? one(aws_iam_role.this[*].arn) : data.aws_iam_role.existing[0].arn
}

output "trust_json" {
  description = "Who may take the role; null where none was made."
  value       = one(aws_iam_role.this[*].assume_role_policy)
}

output "instance_profile_name" {
  description = "Name of the instance profile; null where none was asked for."
  value       = one(aws_iam_instance_profile.this[*].name)
}
