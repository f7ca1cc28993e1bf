# SPDX-License-Identifier: Apache-2.0
# A gateway endpoint: the VPC's traffic to S3 stays in the region's network and costs nothing. On
# demand it goes to no bucket beside the corpus, so a compromised engine cannot copy embeddings into
# somebody else's; and on demand there is an interface endpoint for what comes from beyond the VPC.

# The region: `data.aws_region` has no attribute for it that is in 5.x and not deprecated in 6.x.
data "aws_service" "s3" {
  service_id = "s3"
}

data "aws_caller_identity" "current" {}

locals {
  region = data.aws_service.s3.region

  # An endpoint's policy cannot name roles. Whose principals go through is a condition: keys that
  # somebody brings along from another account are of no use here.
  ours = {
    StringEquals = {
      "aws:PrincipalAccount" = length(var.principal_account_ids) > 0 ? var.principal_account_ids : [data.aws_caller_identity.current.account_id]
    }
  }

  # Written out: without a policy of its own an endpoint keeps the last one that it had.
  everything = [{
    Sid       = "AllOfS3"
    Effect    = "Allow"
    Principal = "*"
    Action    = ["s3:*"]
    Resource  = ["*"]
  }]

  corpora_only = concat(
    [
      {
        Sid       = "ListCorpora"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:ListBucket"]
        Resource  = [for corpus in var.corpora : corpus.arn]
        Condition = local.ours
      },
      {
        Sid       = "UseCorpora"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        Resource  = [for corpus in var.corpora : "${corpus.arn}/${corpus.prefix}*"]
        Condition = local.ours
      },
    ],
    [
      # Without that condition: a registry signs the addresses of its layers with its own account.
      for arns in [var.other_bucket_arns] : {
        Sid       = "ReadOthers"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject", "s3:ListBucket"]
        Resource  = flatten([for arn in arns : [arn, "${arn}/*"]])
      } if length(arns) > 0
    ],
  )

  # By way of text, since the two are of different types.
  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = jsondecode(var.restrict_to_corpora ? jsonencode(local.corpora_only) : jsonencode(local.everything))
  })
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = var.vpc_id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.route_table_ids
  policy            = local.policy
  tags              = var.tags

  lifecycle {
    precondition {
      condition     = alltrue([for corpus in var.corpora : corpus.region == local.region])
      error_message = "A gateway endpoint reaches buckets of its own region only (${local.region})."
    }
    precondition {
      condition     = !var.restrict_to_corpora || length(var.corpora) > 0
      error_message = "`restrict_to_corpora` without `corpora` would refuse everything."
    }
  }
}

resource "aws_vpc_endpoint" "interface" {
  count = var.interface == null ? 0 : 1

  vpc_id              = var.vpc_id
  service_name        = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type   = "Interface"
  subnet_ids          = var.interface.subnet_ids
  security_group_ids  = var.interface.security_group_ids
  private_dns_enabled = var.interface.private_dns
  policy              = local.policy
  tags                = var.tags

  # S3's own names lead here those who ask the resolver's inbound endpoint. In the VPC they lead to the
  # gateway, which costs nothing.
  dynamic "dns_options" {
    for_each = var.interface.private_dns ? [true] : []

    content {
      private_dns_only_for_inbound_resolver_endpoint = dns_options.value
    }
  }

  # Such names are refused as long as there is no gateway.
  depends_on = [aws_vpc_endpoint.s3]
}
