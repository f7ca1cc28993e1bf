# SPDX-License-Identifier: Apache-2.0
# A bucket on MinIO, Ceph or SeaweedFS. What those stores answer differently is left out: public
# access block (501), ownership controls (403), and lifecycle, which the provider waits for in vain
# because the stores do not send the header that it looks for.

resource "aws_s3_bucket" "this" {
  bucket        = var.name
  force_destroy = var.force_destroy
}

resource "aws_s3_bucket_versioning" "this" {
  count = var.versioning ? 1 : 0

  bucket = aws_s3_bucket.this.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_policy" "this" {
  count = var.policy_json == null ? 0 : 1

  bucket = aws_s3_bucket.this.id
  policy = var.policy_json
}
