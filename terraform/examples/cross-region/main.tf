# SPDX-License-Identifier: Apache-2.0
# Home is written; two regions read a copy of their own first, and home last. Everything is encrypted
# with a key of its region. A region may be another account's.

provider "aws" {
  region = var.home_region
}

provider "aws" {
  alias  = "us"
  region = var.replica_regions.us

  dynamic "assume_role" {
    for_each = var.account_role_arns.us == null ? [] : [var.account_role_arns.us]

    content {
      role_arn = assume_role.value
    }
  }
}

provider "aws" {
  alias  = "ap"
  region = var.replica_regions.ap

  dynamic "assume_role" {
    for_each = var.account_role_arns.ap == null ? [] : [var.account_role_arns.ap]

    content {
      role_arn = assume_role.value
    }
  }
}

data "aws_caller_identity" "home" {}

data "aws_caller_identity" "us" {
  provider = aws.us
}

data "aws_caller_identity" "ap" {
  provider = aws.ap
}

locals {
  names = { home = var.name, us = "${var.name}-us", ap = "${var.name}-ap" }

  accounts = {
    home = data.aws_caller_identity.home.account_id
    us   = data.aws_caller_identity.us.account_id
    ap   = data.aws_caller_identity.ap.account_id
  }

  # Engines of another account read home, and write there if they save.
  at_home = {
    for id in distinct(values(local.accounts)) : id => concat(
      ["read"],
      length([for name, account in local.accounts : name if account == id && contains(var.writers, name)]) > 0 ? ["add"] : [],
    ) if id != local.accounts.home
  }
  # Home's account replicates to the copies, and its maintainer deletes there.
  at_replica = {
    for name in ["us", "ap"] : name => {
      for id in [local.accounts.home] : id => ["read", "delete", "replicate"] if id != local.accounts[name]
    }
  }

  roles = { for name in ["home", "us", "ap"] : name => contains(var.writers, name) ? "producer" : "consumer" }

  # What the engines of each region read before home, and what the maintainer cleans up.
  replicas = {
    home       = []
    us         = [module.us.corpus]
    ap         = [module.ap.corpus]
    maintainer = [module.us.corpus, module.ap.corpus]
  }
}

module "home" {
  source = "../../modules/corpus-bucket"

  create            = !contains(keys(var.existing_buckets), "home")
  name              = try(var.existing_buckets["home"].name, local.names.home)
  prefix            = var.prefix
  create_kms_key    = !contains(keys(var.existing_buckets), "home")
  kms_key_arn       = try(var.existing_buckets["home"].kms_key_arn, null)
  key_deletion_days = var.key_deletion_days
  account_access    = local.at_home
  tags              = var.tags
}

module "us" {
  source    = "../../modules/corpus-bucket"
  providers = { aws = aws.us }

  create            = !contains(keys(var.existing_buckets), "us")
  name              = try(var.existing_buckets["us"].name, local.names.us)
  prefix            = var.prefix
  create_kms_key    = !contains(keys(var.existing_buckets), "us")
  kms_key_arn       = try(var.existing_buckets["us"].kms_key_arn, null)
  key_deletion_days = var.key_deletion_days
  account_access    = local.at_replica.us
  tags              = var.tags
}

module "ap" {
  source    = "../../modules/corpus-bucket"
  providers = { aws = aws.ap }

  create            = !contains(keys(var.existing_buckets), "ap")
  name              = try(var.existing_buckets["ap"].name, local.names.ap)
  prefix            = var.prefix
  create_kms_key    = !contains(keys(var.existing_buckets), "ap")
  kms_key_arn       = try(var.existing_buckets["ap"].kms_key_arn, null)
  key_deletion_days = var.key_deletion_days
  account_access    = local.at_replica.ap
  tags              = var.tags
}

module "replication" {
  source = "../../modules/replication"

  name          = "${var.name}-replication"
  source_corpus = module.home.corpus
  destinations  = { us = module.us.corpus, ap = module.ap.corpus }
  batch_copy    = var.batch_copy
  tags          = var.tags
}

module "transfer_config" {
  source   = "../../modules/transfer-config"
  for_each = local.replicas

  home     = module.home.corpus
  replicas = each.value
}

# IAM knows no region, but accounts: each region's role is its own account's.
module "engines_home" {
  source = "../../modules/access"

  name         = "${var.name}-engines-home"
  role         = local.roles.home
  corpora      = [module.home.corpus]
  pod_identity = var.pods
  tags         = var.tags
}

module "engines_us" {
  source    = "../../modules/access"
  providers = { aws = aws.us }

  name         = "${var.name}-engines-us"
  role         = local.roles.us
  corpora      = [module.home.corpus]
  replicas     = local.replicas.us
  pod_identity = var.pods
  tags         = var.tags
}

module "engines_ap" {
  source    = "../../modules/access"
  providers = { aws = aws.ap }

  name         = "${var.name}-engines-ap"
  role         = local.roles.ap
  corpora      = [module.home.corpus]
  replicas     = local.replicas.ap
  pod_identity = var.pods
  tags         = var.tags
}

module "maintainer" {
  source = "../../modules/access"

  name         = "${var.name}-maintainer"
  role         = "maintainer"
  corpora      = [module.home.corpus]
  replicas     = local.replicas.maintainer
  pod_identity = var.maintainer_pods
  tags         = var.tags
}

module "observability" {
  source = "../../modules/observability"

  name          = var.name
  corpus        = module.home.corpus
  destinations  = { us = module.us.corpus.name, ap = module.ap.corpus.name }
  alarm_actions = var.alarm_actions
  tags          = var.tags
}
