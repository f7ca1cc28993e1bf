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
  name = "s3ec"
  role = "consumer"
  corpora = [{
    name        = "embeddings"
    arn         = "arn:aws:s3:::embeddings"
    region      = "eu-central-1"
    prefix      = "team-a/"
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  }]
}

run "consumer_may_read_below_its_prefix_and_nothing_else" {
  command = plan

  assert {
    condition = jsondecode(aws_iam_policy.this.policy).Statement == [
      {
        Sid       = "List0"
        Effect    = "Allow"
        Action    = ["s3:ListBucket"]
        Resource  = ["arn:aws:s3:::embeddings"]
        Condition = { StringLike = { "s3:prefix" = ["team-a/*"] } }
      },
      {
        Sid      = "Objects0"
        Effect   = "Allow"
        Action   = ["s3:GetObject"]
        Resource = ["arn:aws:s3:::embeddings/team-a/*"]
      },
      {
        Sid      = "Key0"
        Effect   = "Allow"
        Action   = ["kms:Decrypt"]
        Resource = ["arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"]
        Condition = {
          StringEquals = { "kms:ViaService" = "s3.eu-central-1.amazonaws.com" }
          StringLike   = { "kms:EncryptionContext:aws:s3:arn" = ["arn:aws:s3:::embeddings", "arn:aws:s3:::embeddings/*"] }
        }
      },
    ]
    error_message = "the policy is another one"
  }
  assert {
    condition     = length(aws_iam_role.this) == 0
    error_message = "a role that nobody may take"
  }
}

run "producer_may_add_and_not_delete" {
  command = plan

  variables {
    role = "producer"
  }

  assert {
    condition     = jsondecode(aws_iam_policy.this.policy).Statement[1].Action == ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
    error_message = "a producer may do other things"
  }
  assert {
    condition     = jsondecode(aws_iam_policy.this.policy).Statement[2].Action == ["kms:Decrypt", "kms:GenerateDataKey"]
    error_message = "a producer uses the key for other things"
  }
}

run "maintainer_may_delete_below_the_prefix" {
  command = plan

  variables {
    role = "maintainer"
  }

  assert {
    condition     = contains(jsondecode(aws_iam_policy.this.policy).Statement[1].Action, "s3:DeleteObject")
    error_message = "gc could not delete"
  }
  assert {
    condition     = jsondecode(aws_iam_policy.this.policy).Statement[1].Resource == ["arn:aws:s3:::embeddings/team-a/*"]
    error_message = "and elsewhere"
  }
}

run "no_role_has_a_wildcard_action_or_the_resource_of_everything" {
  command = plan

  variables {
    role             = "maintainer"
    pod_identity     = [{ namespace = "serving", service_account = "vllm" }]
    assume_role_arns = ["arn:aws:iam::123456789012:role/operator"]
  }

  assert {
    condition = alltrue(flatten([
      for one in concat(jsondecode(aws_iam_policy.this.policy).Statement, jsondecode(aws_iam_role.this[0].assume_role_policy).Statement) : [
        [for action in one.Action : !strcontains(action, "*")],
        [for resource in try(one.Resource, []) : resource != "*"],
      ]
    ]))
    error_message = "a wildcard"
  }
}

run "service_account_takes_the_role_by_its_full_name" {
  command = plan

  variables {
    irsa = [{
      provider_arn    = "arn:aws:iam::123456789012:oidc-provider/oidc.example/id/ABC"
      issuer          = "oidc.example/id/ABC"
      namespace       = "serving"
      service_account = "vllm"
    }]
  }

  assert {
    condition = jsondecode(aws_iam_role.this[0].assume_role_policy).Statement[0].Condition.StringEquals == {
      "oidc.example/id/ABC:aud" = "sts.amazonaws.com"
      "oidc.example/id/ABC:sub" = "system:serviceaccount:serving:vllm"
    }
    error_message = "other accounts could take it"
  }
}

run "pods_take_the_role_by_their_service_account" {
  command = plan

  variables {
    pod_identity = [
      { namespace = "serving", service_account = "vllm" },
      { namespace = "batch", service_account = "encoder", cluster = "gpu" },
    ]
  }

  assert {
    condition = [for one in jsondecode(aws_iam_role.this[0].assume_role_policy).Statement : [one.Principal.Service, one.Condition]] == [
      ["pods.eks.amazonaws.com", {
        StringEquals = {
          "aws:RequestTag/kubernetes-namespace"       = "serving"
          "aws:RequestTag/kubernetes-service-account" = "vllm"
        }
        StringEqualsIfExists = { "aws:SourceAccount" = "123456789012" }
      }],
      ["pods.eks.amazonaws.com", {
        StringEquals = {
          "aws:RequestTag/eks-cluster-name"           = "gpu"
          "aws:RequestTag/kubernetes-namespace"       = "batch"
          "aws:RequestTag/kubernetes-service-account" = "encoder"
        }
        StringEqualsIfExists = { "aws:SourceAccount" = "123456789012" }
      }],
    ]
    error_message = "other pods could take it"
  }
}

run "instances_and_named_people_take_the_role" {
  command = plan

  variables {
    instance_profile = true
    assume_role_arns = ["arn:aws:iam::123456789012:role/operator"]
  }

  assert {
    condition = [for one in jsondecode(aws_iam_role.this[0].assume_role_policy).Statement : jsonencode(one.Principal)] == [
      jsonencode({ AWS = ["arn:aws:iam::123456789012:role/operator"] }), jsonencode({ Service = "ec2.amazonaws.com" }),
    ]
    error_message = "not those that were asked for"
  }
  assert {
    condition     = length(aws_iam_instance_profile.this) == 1
    error_message = "no instance profile"
  }
}

run "instance_that_deletes_is_refused" {
  command = plan

  variables {
    role             = "maintainer"
    instance_profile = true
  }

  expect_failures = [aws_iam_role.this]
}

run "pod_account_with_a_star_is_refused" {
  command = plan

  variables {
    pod_identity = [{ namespace = "*", service_account = "vllm" }]
  }

  expect_failures = [var.pod_identity]
}

run "whole_account_as_maintainer_is_refused" {
  command = plan

  variables {
    assume_role_arns = ["arn:aws:iam::123456789012:root"]
  }

  expect_failures = [var.assume_role_arns]
}

run "account_with_a_star_is_refused" {
  command = plan

  variables {
    irsa = [{ provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", issuer = "x", namespace = "serving", service_account = "*" }]
  }

  expect_failures = [var.irsa]
}

run "issuer_with_a_scheme_is_refused" {
  command = plan

  variables {
    irsa = [{ provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", issuer = "https://x", namespace = "serving", service_account = "vllm" }]
  }

  expect_failures = [var.irsa]
}

run "prefix_without_a_slash_is_refused" {
  command = plan

  variables {
    corpora = [{ name = "e", arn = "arn:aws:s3:::e", region = "eu-central-1", prefix = "team-a", kms_key_arn = null }]
  }

  expect_failures = [var.corpora]
}

run "unknown_role_is_refused" {
  command = plan

  variables {
    role = "admin"
  }

  expect_failures = [var.role]
}

run "replicas_are_read_and_home_is_written" {
  command = plan

  variables {
    role     = "producer"
    replicas = [{ name = "near", arn = "arn:aws:s3:::near", region = "us-east-1", prefix = "team-a/", kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/near" }]
  }

  assert {
    condition = {
      for one in jsondecode(aws_iam_policy.this.policy).Statement : one.Sid => [one.Action, one.Resource]
      } == {
      List0    = [["s3:ListBucket"], ["arn:aws:s3:::embeddings"]]
      List1    = [["s3:ListBucket"], ["arn:aws:s3:::near"]]
      Objects0 = [["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"], ["arn:aws:s3:::embeddings/team-a/*"]]
      Objects1 = [["s3:GetObject"], ["arn:aws:s3:::near/team-a/*"]]
      Key0     = [["kms:Decrypt", "kms:GenerateDataKey"], ["arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"]]
      Key1     = [["kms:Decrypt"], ["arn:aws:kms:us-east-1:123456789012:key/near"]]
    }
    error_message = "the policy is another one"
  }
}

run "who_writes_back_adds_to_the_replica_and_only_there" {
  command = plan

  variables {
    replicas = [{ name = "near", arn = "arn:aws:s3:::near", region = "us-east-1", prefix = "team-a/", kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/near", fill = true }]
  }

  assert {
    condition = {
      for one in jsondecode(aws_iam_policy.this.policy).Statement : one.Sid => one.Action if !startswith(one.Sid, "List")
      } == {
      Objects0 = ["s3:GetObject"]
      Objects1 = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
      Key0     = ["kms:Decrypt"]
      Key1     = ["kms:Decrypt", "kms:GenerateDataKey"]
    }
    error_message = "a reader writes at home, or not to its replica"
  }
}

run "maintainer_deletes_in_all_places" {
  command = plan

  variables {
    role     = "maintainer"
    replicas = [{ name = "near", arn = "arn:aws:s3:::near", region = "us-east-1", prefix = "team-a/", kms_key_arn = null }]
  }

  assert {
    condition = [
      for one in jsondecode(aws_iam_policy.this.policy).Statement : contains(one.Action, "s3:DeleteObject") if startswith(one.Sid, "Objects")
    ] == [true, true]
    error_message = "gc could not delete somewhere"
  }
}

run "existing_role_gets_the_policy_and_no_other_is_made" {
  command = plan

  override_data {
    target = data.aws_iam_role.existing[0]
    values = { name = "engines", arn = "arn:aws:iam::123456789012:role/engines" }
  }

  variables {
    existing_role_name = "engines"
  }

  assert {
    condition     = aws_iam_role_policy_attachment.this["existing"].role == "engines" && length(aws_iam_role.this) == 0
    error_message = "not the role that exists"
  }
  assert {
    condition     = output.role_arn == "arn:aws:iam::123456789012:role/engines" && output.trust_json == null
    error_message = "another role is handed on"
  }
}

run "existing_role_with_others_who_may_take_it_is_refused" {
  command = plan

  override_data {
    target = data.aws_iam_role.existing[0]
    values = { name = "engines", arn = "arn:aws:iam::123456789012:role/engines" }
  }

  variables {
    existing_role_name = "engines"
    pod_identity       = [{ namespace = "serving", service_account = "vllm" }]
  }

  expect_failures = [aws_iam_role_policy_attachment.this]
}
