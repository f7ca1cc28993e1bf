# SPDX-License-Identifier: Apache-2.0

output "corpus" {
  description = "The bucket, in the shape that the corpus-bucket module has."
  value = {
    name        = aws_s3_bucket.this.bucket
    arn         = "arn:aws:s3:::${var.name}"
    region      = "us-east-1"
    prefix      = var.prefix
    kms_key_arn = null
  }
}

output "ec_transfer_config" {
  description = "For each role the JSON that `vllm serve --ec-transfer-config` takes."
  value = {
    for role in ["ec_producer", "ec_consumer", "ec_both"] : role => jsonencode({
      ec_connector = "S3ECConnector"
      ec_role      = role
      ec_connector_extra_config = merge(
        { bucket = aws_s3_bucket.this.bucket, endpoint_url = var.endpoint_url, region = "us-east-1" },
        var.prefix == "" ? {} : { prefix = trimsuffix(var.prefix, "/") },
        var.ca_bundle == null ? {} : { ca_bundle = var.ca_bundle },
        # s3ec asks for a word before it sends embeddings over a network in clear.
        can(regex("^http://(127\\.|localhost|\\[::1\\])", var.endpoint_url)) || startswith(var.endpoint_url, "https://") ? {} : { allow_http = true },
      )
    })
  }
}
