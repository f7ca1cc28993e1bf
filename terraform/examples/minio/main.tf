# SPDX-License-Identifier: Apache-2.0
# A bucket on MinIO or another S3-compatible store. Keys come from AWS_ACCESS_KEY_ID and
# AWS_SECRET_ACCESS_KEY, as everywhere.

provider "aws" {
  region = "us-east-1"

  # There is no account, no STS and no metadata service behind such a store.
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
  s3_use_path_style           = true
  custom_ca_bundle            = var.ca_bundle

  endpoints {
    s3 = var.endpoint_url
  }
}

module "corpus" {
  source = "../../modules/s3-compatible-bucket"

  name         = var.bucket
  prefix       = var.prefix
  endpoint_url = var.endpoint_url
  ca_bundle    = var.ca_bundle
  tags         = var.tags
}
