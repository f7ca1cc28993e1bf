# SPDX-License-Identifier: Apache-2.0

terraform {
  required_version = ">= 1.7"

  required_providers {
    aws = {
      source = "hashicorp/aws"
      # From 6.23 on the provider reads tags through S3 Control, which S3-compatible stores lack,
      # and nothing here was run with 6.x.
      version = "~> 5.86"
    }
  }
}
