# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {}

variables {
  name         = "embeddings"
  endpoint_url = "https://minio.example:9000"
  ca_bundle    = "/etc/s3ec/ca.pem"
}

run "settings_open_the_store_with_its_authority" {
  command = plan

  assert {
    condition = jsondecode(output.ec_transfer_config["ec_both"]).ec_connector_extra_config == {
      bucket       = "embeddings"
      endpoint_url = "https://minio.example:9000"
      region       = "us-east-1"
      ca_bundle    = "/etc/s3ec/ca.pem"
    }
    error_message = "the settings are other ones"
  }
  assert {
    condition     = aws_s3_bucket.this.tags == null || length(aws_s3_bucket.this.tags) == 0
    error_message = "tags, which not every store keeps"
  }
  assert {
    condition     = length(aws_s3_bucket_versioning.this) == 0 && length(aws_s3_bucket_policy.this) == 0
    error_message = "something that nobody asked for"
  }
}

run "plain_http_says_so_in_the_settings_unless_it_stays_on_the_machine" {
  command = plan

  variables {
    endpoint_url = "http://minio.example:9000"
    ca_bundle    = null
  }

  assert {
    condition     = jsondecode(output.ec_transfer_config["ec_both"]).ec_connector_extra_config.allow_http
    error_message = "s3ec would refuse these settings"
  }
}

run "plain_http_on_loopback_needs_no_word" {
  command = plan

  variables {
    endpoint_url = "http://127.0.0.1:9000"
    ca_bundle    = null
    versioning   = true
    policy_json  = "{\"Version\": \"2012-10-17\", \"Statement\": []}"
  }

  assert {
    condition     = !strcontains(output.ec_transfer_config["ec_both"], "allow_http")
    error_message = "allow_http without need"
  }
  assert {
    condition     = length(aws_s3_bucket_versioning.this) == 1 && length(aws_s3_bucket_policy.this) == 1
    error_message = "versioning or policy is missing"
  }
}

run "name_with_a_dot_is_refused" {
  command = plan

  variables {
    name = "embeddings.example"
  }

  expect_failures = [var.name]
}

run "endpoint_with_a_path_is_refused" {
  command = plan

  variables {
    endpoint_url = "https://minio.example:9000/embeddings"
  }

  expect_failures = [var.endpoint_url]
}

run "policy_that_is_no_policy_is_refused" {
  command = plan

  variables {
    policy_json = "allow all"
  }

  expect_failures = [var.policy_json]
}
