# SPDX-License-Identifier: Apache-2.0
# A gateway endpoint: traffic to the corpus stays in the region's network, costs nothing, and goes
# to no other bucket, so a compromised engine cannot copy embeddings into somebody else's.

data "aws_region" "current" {}

locals {
  statements = concat(
    [
      {
        Sid       = "ListCorpora"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:ListBucket"]
        Resource  = [for corpus in var.corpora : corpus.arn]
      },
      {
        Sid       = "UseCorpora"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        Resource  = [for corpus in var.corpora : "${corpus.arn}/${corpus.prefix}*"]
      },
    ],
    [
      for arns in [var.other_bucket_arns] : {
        Sid       = "ReadOthers"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject", "s3:ListBucket"]
        Resource  = flatten([for arn in arns : [arn, "${arn}/*"]])
      } if length(arns) > 0
    ],
  )
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = var.vpc_id
  service_name      = "com.amazonaws.${data.aws_region.current.name}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.route_table_ids
  policy            = jsonencode({ Version = "2012-10-17", Statement = local.statements })
  tags              = var.tags

  lifecycle {
    precondition {
      condition     = alltrue([for corpus in var.corpora : corpus.region == data.aws_region.current.name])
      error_message = "A gateway endpoint reaches buckets of its own region only (${data.aws_region.current.name})."
    }
  }
}
