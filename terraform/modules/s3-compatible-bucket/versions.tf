# SPDX-License-Identifier: Apache-2.0

terraform {
  required_version = ">= 1.7"

  required_providers {
    aws = {
      source = "hashicorp/aws"
      # From 6.23 on the provider reads a bucket's tags through S3 Control, which such stores lack.
      version = ">= 5.86, < 6.23"
    }
  }
}
