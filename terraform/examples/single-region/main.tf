# SPDX-License-Identifier: Apache-2.0
# One bucket, SSE-S3, and a role for those who read, those who add, and those who clean up.

provider "aws" {
  region = var.region
}

module "corpus" {
  source = "../../modules/corpus-bucket"

  name          = var.bucket
  prefix        = var.prefix
  force_destroy = var.force_destroy
  tags          = var.tags
}

module "access" {
  source   = "../../modules/access"
  for_each = toset(["consumer", "producer", "maintainer"])

  name    = "${var.bucket}-${each.key}"
  role    = each.key
  corpora = [module.corpus.corpus]
  tags    = var.tags

  # Engines run on instances; who deletes is named.
  instance_profile = each.key != "maintainer"
  assume_role_arns = each.key == "maintainer" ? var.maintainer_arns : []
}
