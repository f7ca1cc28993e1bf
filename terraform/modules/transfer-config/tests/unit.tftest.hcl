# SPDX-License-Identifier: Apache-2.0

variables {
  home = { name = "corpus-us", region = "us-east-1", prefix = "" }
}

run "replicas_are_in_the_order_given_and_home_is_named_first" {
  command = plan

  variables {
    replicas = [
      { name = "corpus-eu", region = "eu-central-1", prefix = "" },
      { name = "rack", region = "us-east-1", prefix = "", endpoint_url = "https://minio.example:9000", ca_bundle = "/etc/s3ec/ca.pem", fill = true },
    ]
  }

  assert {
    condition = {
      for role, text in output.ec_transfer_config : role => jsonencode(jsondecode(text))
      } == {
      for role in ["ec_producer", "ec_consumer", "ec_both"] : role => jsonencode({
        ec_connector = "S3ECConnector"
        ec_role      = role
        ec_connector_extra_config = {
          bucket = "corpus-us"
          region = "us-east-1"
          replicas = [
            { bucket = "corpus-eu", region = "eu-central-1" },
            { bucket = "rack", region = "us-east-1", endpoint_url = "https://minio.example:9000", ca_bundle = "/etc/s3ec/ca.pem", fill = true },
          ]
        }
      })
    }
    error_message = "the settings are other ones"
  }
}

run "without_replicas_there_is_no_word_of_them" {
  command = plan

  variables {
    home = { name = "corpus-us", region = "us-east-1", prefix = "team-a/corpus/" }
  }

  assert {
    condition = jsondecode(output.ec_transfer_config["ec_both"]).ec_connector_extra_config == {
      bucket = "corpus-us"
      region = "us-east-1"
      prefix = "team-a/corpus"
    }
    error_message = "the settings are other ones"
  }
}

run "plain_http_is_said_where_it_leaves_the_machine" {
  command = plan

  variables {
    home     = { name = "corpus", region = "us-east-1", prefix = "", endpoint_url = "http://127.0.0.1:9000" }
    replicas = [{ name = "rack", region = "us-east-1", prefix = "", endpoint_url = "http://rack.example:9000" }]
  }

  assert {
    condition     = jsondecode(output.ec_transfer_config["ec_both"]).ec_connector_extra_config.allow_http
    error_message = "engines would refuse the replica"
  }
}

run "replica_with_another_prefix_is_refused" {
  command = plan

  variables {
    replicas = [{ name = "corpus-eu", region = "eu-central-1", prefix = "team-b/" }]
  }

  expect_failures = [output.ec_transfer_config]
}

run "home_among_the_replicas_is_refused" {
  command = plan

  variables {
    replicas = [{ name = "corpus-us", region = "us-east-1", prefix = "" }]
  }

  expect_failures = [output.ec_transfer_config]
}
