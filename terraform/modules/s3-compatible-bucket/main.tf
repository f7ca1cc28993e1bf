# SPDX-License-Identifier: Apache-2.0
# A bucket on MinIO, Ceph or SeaweedFS. What those stores answer differently is left out: public
# access block (501), ownership controls (403), and lifecycle, which the provider waits for in vain
# because the stores do not send the header that it looks for.

locals {
  corpus = {
    name         = aws_s3_bucket.this.bucket
    arn          = "arn:aws:s3:::${var.name}"
    region       = "us-east-1"
    prefix       = var.prefix
    kms_key_arn  = null
    endpoint_url = var.endpoint_url
    ca_bundle    = var.ca_bundle
  }
}

resource "aws_s3_bucket" "this" {
  # checkov:skip=CKV_AWS_18: these stores have no access log of S3's form; they log for themselves
  # checkov:skip=CKV_AWS_144: replication is set up by the store's own tools
  # checkov:skip=CKV_AWS_145: a key belongs to the store, not to KMS; it is configured there
  # checkov:skip=CKV2_AWS_6: the stores answer 501; nothing is public there without a policy that says so
  # checkov:skip=CKV2_AWS_61: the provider waits for it in vain (see above); the store's own tool sets it
  bucket        = var.name
  force_destroy = var.force_destroy
  tags          = var.tags
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

module "transfer_config" {
  source = "../transfer-config"

  home = local.corpus
}
