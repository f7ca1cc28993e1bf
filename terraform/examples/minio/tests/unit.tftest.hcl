# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {}

run "settings_name_the_store" {
  command = plan

  assert {
    condition     = jsondecode(output.ec_transfer_config["ec_both"]).ec_connector_extra_config.endpoint_url == "https://localhost:9000"
    error_message = "the settings name another store"
  }
}
