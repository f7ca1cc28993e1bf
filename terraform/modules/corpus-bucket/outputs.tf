# SPDX-License-Identifier: Apache-2.0

output "corpus" {
  description = "The bucket as the other modules take it."
  value       = local.corpus

  # Replication is refused for a bucket that has no versioning yet.
  depends_on = [aws_s3_bucket_versioning.this]
}

output "ec_transfer_config" {
  description = "For each role the JSON that `vllm serve --ec-transfer-config` takes, for this bucket alone. The transfer-config module adds replicas."
  value       = module.transfer_config.ec_transfer_config
}

output "policy_json" {
  description = "The bucket's policy; null for an existing bucket."
  value       = one(aws_s3_bucket_policy.this[*].policy)
}

output "access_log_bucket" {
  description = "Name of the bucket once its policy is there, for `access_log` of another bucket: S3 refuses a target that does not let it write."
  value       = local.corpus.name

  depends_on = [aws_s3_bucket_policy.this]
}
