# SPDX-License-Identifier: Apache-2.0

terraform {
  required_version = ">= 1.7"

  required_providers {
    aws = {
      source = "hashicorp/aws"
      # Run with 5.100.0; of 6.x its upgrade guide was read, and only what both know is used.
      version = ">= 5.86, < 7"
    }
  }
}
