# SPDX-License-Identifier: Apache-2.0
# One region with everything that the modules offer: a key, an endpoint through which alone the
# corpus is read, access logs, an organisation's own statement, roles for pods and people, alarms.
# What is there already is handed in.

provider "aws" {
  region = var.region

  default_tags {
    tags = var.tags
  }
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

locals {
  # Written out: the bucket's policy names the role, and the role's policy the bucket.
  maintainer_role_arn = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:role/${var.name}-maintainer"
  makes_bucket        = var.existing.bucket == null
  bucket              = local.makes_bucket ? var.name : var.existing.bucket
  vpc_endpoint_ids    = length(var.existing.vpc_endpoint_ids) > 0 ? var.existing.vpc_endpoint_ids : module.network[0].vpc_endpoint_ids
}

# Where S3 writes who asked for what. The module fits: private, TLS only, and nothing is write-once
# below a prefix that no corpus has. S3 encrypts its logs with its own keys only.
module "logs" {
  source = "../../modules/corpus-bucket"
  count  = local.makes_bucket ? 1 : 0

  name            = "${var.name}-logs"
  write_once      = false
  lifecycle_rules = { noncurrent_days = 1, folders = [{ prefix = "logs/", expire_days = var.log_days }] }

  additional_policy_statements = [{
    sid        = "AccessLogs"
    effect     = "Allow"
    principals = { Service = ["logging.s3.amazonaws.com"] }
    actions    = ["s3:PutObject"]
    resources  = ["arn:${data.aws_partition.current.partition}:s3:::${var.name}-logs/*"]
    conditions = {
      StringEquals = { "aws:SourceAccount" = [data.aws_caller_identity.current.account_id] }
      ArnLike      = { "aws:SourceArn" = ["arn:${data.aws_partition.current.partition}:s3:::${var.name}"] }
    }
  }]
}

module "corpus" {
  source = "../../modules/corpus-bucket"

  create         = local.makes_bucket
  name           = local.bucket
  prefix         = var.prefix
  create_kms_key = local.makes_bucket
  kms_key_arn    = var.existing.kms_key_arn
  access_log     = local.makes_bucket ? { bucket = module.logs[0].access_log_bucket, prefix = "logs/" } : null

  lifecycle_rules = {
    folders = [for namespace in var.cold_namespaces : { prefix = "${var.prefix}${namespace}/objects/", intelligent_tiering_days = 30 }]
  }

  network_access = {
    vpc_endpoint_ids = local.vpc_endpoint_ids
    exempt_role_arns = [local.maintainer_role_arn]
  }

  additional_policy_statements = [
    for id in var.organization_id == null ? [] : [var.organization_id] : {
      sid     = "DenyOtherOrganizations"
      effect  = "Deny"
      actions = ["s3:*"]
      conditions = {
        StringNotEqualsIfExists = { "aws:PrincipalOrgID" = [id] }
        BoolIfExists            = { "aws:PrincipalIsAWSService" = ["false"] }
      }
    }
  ]
}

module "network" {
  source = "../../modules/network"
  count  = length(var.existing.vpc_endpoint_ids) > 0 ? 0 : 1

  vpc_id              = var.vpc_id
  route_table_ids     = var.route_table_ids
  interface           = var.interface_endpoint
  restrict_to_corpora = var.restrict_to_corpora
  corpora             = [module.corpus.corpus]
  # Layers of the region's container registry.
  other_bucket_arns = ["arn:${data.aws_partition.current.partition}:s3:::prod-${var.region}-starport-layer-bucket"]
}

module "engines" {
  source = "../../modules/access"

  name               = "${var.name}-engines"
  role               = "producer"
  corpora            = [module.corpus.corpus]
  existing_role_name = var.existing.engine_role_name
  irsa               = var.irsa
  pod_identity       = var.pod_identity
}

# With it EKS hands the role to the pods of the account; IRSA needs an annotation instead.
resource "aws_eks_pod_identity_association" "engines" {
  for_each = { for one in var.pod_identity : "${one.cluster}/${one.namespace}/${one.service_account}" => one }

  cluster_name    = each.value.cluster
  namespace       = each.value.namespace
  service_account = each.value.service_account
  role_arn        = module.engines.role_arn
}

module "maintainer" {
  source = "../../modules/access"

  name             = "${var.name}-maintainer"
  role             = "maintainer"
  corpora          = [module.corpus.corpus]
  assume_role_arns = var.maintainer_arns
}

module "observability" {
  source = "../../modules/observability"

  name          = var.name
  corpus        = module.corpus.corpus
  alarm_actions = var.alarm_actions
}
