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

output "batch_copy_job" {
  description = "What `aws s3control create-job --cli-input-json` takes, in the source's region, to copy what was there before the rules and what failed since; null without `batch_copy`."
  value = !var.batch_copy ? null : jsonencode({
    AccountId            = data.aws_caller_identity.current.account_id
    ConfirmationRequired = false
    Operation            = { S3ReplicateObject = {} }
    Priority             = 10
    RoleArn              = local.batch_role_arn
    # The counts of what was copied and of what failed are the job's own (`describe-job`).
    Report = { Enabled = false }
    ManifestGenerator = {
      S3JobManifestGenerator = {
        SourceBucket         = var.source_corpus.arn
        EnableManifestOutput = false
        Filter = merge(
          { EligibleForReplication = true, ObjectReplicationStatuses = ["NONE", "FAILED"] },
          var.source_corpus.prefix == "" ? {} : { KeyNameConstraint = { MatchAnyPrefix = [var.source_corpus.prefix] } },
        )
      }
    }
  })

  # A job that begins before its rules are there finds nothing to copy.
  depends_on = [aws_s3_bucket_replication_configuration.this, aws_iam_role_policy.batch]
}
