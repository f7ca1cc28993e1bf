# SPDX-License-Identifier: Apache-2.0

output "corpus" {
  description = "The bucket as the other modules take it."
  value = {
    name        = aws_s3_bucket.this.bucket
    arn         = local.arn
    region      = local.region
    prefix      = var.prefix
    kms_key_arn = var.kms_key_arn
  }

  # Replication is refused for a bucket that has no versioning yet.
  depends_on = [aws_s3_bucket_versioning.this]
}

output "ec_transfer_config" {
  description = "For each role the JSON that `vllm serve --ec-transfer-config` takes."
  value = {
    for role in ["ec_producer", "ec_consumer", "ec_both"] : role => jsonencode({
      ec_connector = "S3ECConnector"
      ec_role      = role
      ec_connector_extra_config = merge(
        { bucket = aws_s3_bucket.this.bucket, region = local.region },
        var.prefix == "" ? {} : { prefix = trimsuffix(var.prefix, "/") },
        var.kms_key_arn == null ? {} : { sse = "aws:kms", sse_kms_key_id = var.kms_key_arn },
      )
    })
  }
}

output "access_log_bucket" {
  description = "Name of the bucket once its policy is there, for `access_log` of another bucket: S3 refuses a target that does not let it write."
  value       = aws_s3_bucket.this.bucket

  depends_on = [aws_s3_bucket_policy.this]
}
