# SPDX-License-Identifier: Apache-2.0
# A second region without replication: its engines read a bucket of their own first, home last, and
# put into their own what they had to fetch from home. It fills with what is asked for there.

provider "aws" {
  region = var.home_region
}

provider "aws" {
  alias  = "near"
  region = var.near_region
}

locals {
  near = merge(module.near.corpus, { fill = true })
}

module "home" {
  source = "../../modules/corpus-bucket"

  name   = var.name
  prefix = var.prefix
  tags   = var.tags
}

module "near" {
  source    = "../../modules/corpus-bucket"
  providers = { aws = aws.near }

  name   = "${var.name}-near"
  prefix = var.prefix
  tags   = var.tags
}

module "transfer_config" {
  source = "../../modules/transfer-config"

  home     = module.home.corpus
  replicas = [local.near]
}

module "engines_home" {
  source = "../../modules/access"

  name         = "${var.name}-engines-home"
  role         = "producer"
  corpora      = [module.home.corpus]
  pod_identity = var.pods
  tags         = var.tags
}

# Adds to the near bucket what home has, and to home nothing.
module "engines_near" {
  source = "../../modules/access"

  name         = "${var.name}-engines-near"
  role         = "consumer"
  corpora      = [module.home.corpus]
  replicas     = [local.near]
  pod_identity = var.pods
  tags         = var.tags
}

module "maintainer" {
  source = "../../modules/access"

  name         = "${var.name}-maintainer"
  role         = "maintainer"
  corpora      = [module.home.corpus]
  replicas     = [local.near]
  pod_identity = var.maintainer_pods
  tags         = var.tags
}
