# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_service" {
    defaults = { region = "eu-central-1" }
  }
}

variables {
  vpc_id              = "vpc-0123456789abcdef0"
  route_table_ids     = ["rtb-0123456789abcdef0"]
  restrict_to_corpora = true
  corpora             = [{ name = "embeddings", arn = "arn:aws:s3:::embeddings", region = "eu-central-1", prefix = "team-a/", kms_key_arn = null }]
}

run "nothing_is_refused_unless_asked" {
  command = plan

  variables {
    restrict_to_corpora = false
    corpora             = []
  }

  assert {
    condition = jsondecode(aws_vpc_endpoint.s3.policy).Statement == [
      { Sid = "AllOfS3", Effect = "Allow", Principal = "*", Action = ["s3:*"], Resource = ["*"] },
    ]
    error_message = "other traffic to S3 is refused"
  }
  assert {
    condition     = length(aws_vpc_endpoint.interface) == 0
    error_message = "an endpoint that costs, and that nobody asked for"
  }
}

run "endpoint_lets_through_the_corpus_and_nothing_else" {
  command = plan

  assert {
    condition     = aws_vpc_endpoint.s3.service_name == "com.amazonaws.eu-central-1.s3" && aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway"
    error_message = "another endpoint"
  }
  assert {
    condition = flatten([for one in jsondecode(aws_vpc_endpoint.s3.policy).Statement : one.Resource]) == [
      "arn:aws:s3:::embeddings", "arn:aws:s3:::embeddings/team-a/*",
    ]
    error_message = "another bucket can be reached"
  }
}

run "corpora_are_reached_with_keys_of_this_account_only" {
  command = plan

  assert {
    condition = [for one in jsondecode(aws_vpc_endpoint.s3.policy).Statement : one.Condition] == [
      { StringEquals = { "aws:PrincipalAccount" = ["123456789012"] } },
      { StringEquals = { "aws:PrincipalAccount" = ["123456789012"] } },
    ]
    error_message = "keys of other accounts go through"
  }
}

run "other_accounts_can_be_named" {
  command = plan

  variables {
    principal_account_ids = ["210987654321"]
  }

  assert {
    condition     = jsondecode(aws_vpc_endpoint.s3.policy).Statement[0].Condition.StringEquals["aws:PrincipalAccount"] == ["210987654321"]
    error_message = "another account"
  }
}

run "account_that_is_none_is_refused" {
  command = plan

  variables {
    principal_account_ids = ["*"]
  }

  expect_failures = [var.principal_account_ids]
}

run "other_buckets_can_be_read_where_they_are_named" {
  command = plan

  variables {
    other_bucket_arns = ["arn:aws:s3:::layers"]
  }

  assert {
    condition     = jsondecode(aws_vpc_endpoint.s3.policy).Statement[2].Resource == ["arn:aws:s3:::layers", "arn:aws:s3:::layers/*"]
    error_message = "the other bucket cannot be read"
  }
  assert {
    condition     = jsondecode(aws_vpc_endpoint.s3.policy).Statement[2].Action == ["s3:GetObject", "s3:ListBucket"]
    error_message = "the other bucket can be written to"
  }
}

run "bucket_of_another_region_is_refused" {
  command = plan

  variables {
    corpora = [{ name = "e", arn = "arn:aws:s3:::e", region = "us-east-1", prefix = "", kms_key_arn = null }]
  }

  expect_failures = [aws_vpc_endpoint.s3]
}

run "star_among_the_other_buckets_is_refused" {
  command = plan

  variables {
    other_bucket_arns = ["arn:aws:s3:::*"]
  }

  expect_failures = [var.other_bucket_arns]
}

run "endpoint_without_a_route_is_refused" {
  command = plan

  variables {
    route_table_ids = []
  }

  expect_failures = [var.route_table_ids]
}

run "restriction_to_nothing_is_refused" {
  command = plan

  variables {
    corpora = []
  }

  expect_failures = [aws_vpc_endpoint.s3]
}

run "interface_endpoint_has_the_same_policy_and_serves_who_comes_from_beyond" {
  command = plan

  override_resource {
    target          = aws_vpc_endpoint.interface
    override_during = plan
    values = {
      id        = "vpce-2"
      dns_entry = [{ dns_name = "*.vpce-2-abc.s3.eu-central-1.vpce.amazonaws.com", hosted_zone_id = "Z" }]
    }
  }

  override_resource {
    target          = aws_vpc_endpoint.s3
    override_during = plan
    values          = { id = "vpce-1" }
  }

  variables {
    interface = { subnet_ids = ["subnet-1"], security_group_ids = ["sg-1"], private_dns = true }
  }

  assert {
    condition     = aws_vpc_endpoint.interface[0].vpc_endpoint_type == "Interface" && aws_vpc_endpoint.interface[0].policy == aws_vpc_endpoint.s3.policy
    error_message = "another endpoint, or one that lets through something else"
  }
  assert {
    condition     = aws_vpc_endpoint.interface[0].private_dns_enabled && one(aws_vpc_endpoint.interface[0].dns_options).private_dns_only_for_inbound_resolver_endpoint
    error_message = "the VPC's own traffic is paid for"
  }
  assert {
    condition     = output.vpc_endpoint_ids == ["vpce-1", "vpce-2"] && output.interface_endpoint_url == "https://bucket.vpce-2-abc.s3.eu-central-1.vpce.amazonaws.com"
    error_message = "engines would not find it, or the bucket would refuse it"
  }
}

run "interface_endpoint_without_a_subnet_is_refused" {
  command = plan

  variables {
    interface = { subnet_ids = [], security_group_ids = ["sg-1"] }
  }

  expect_failures = [var.interface]
}
