# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {}

variables {
  name          = "s3ec"
  corpus        = { name = "embeddings", arn = "arn:aws:s3:::embeddings", region = "eu-central-1", prefix = "team-a/", kms_key_arn = null }
  destinations  = { us = "embeddings-us", ap = "embeddings-ap" }
  alarm_actions = ["arn:aws:sns:eu-central-1:123456789012:oncall"]
}

run "each_copy_is_watched_for_lag_and_failures" {
  command = plan

  assert {
    condition     = { for rule, alarm in aws_cloudwatch_metric_alarm.replication_latency : rule => alarm.dimensions["DestinationBucket"] } == { us = "embeddings-us", ap = "embeddings-ap" }
    error_message = "a copy is not watched"
  }
  assert {
    condition     = alltrue([for alarm in values(aws_cloudwatch_metric_alarm.replication_failures) : alarm.threshold == 0 && alarm.alarm_actions == toset(["arn:aws:sns:eu-central-1:123456789012:oncall"])])
    error_message = "a failed copy alarms nobody"
  }
}

run "refused_requests_are_watched_below_the_prefix" {
  command = plan

  assert {
    condition     = one(aws_s3_bucket_metric.requests[0].filter).prefix == "team-a/"
    error_message = "other folders are counted"
  }
  assert {
    condition = toset([
      for query in aws_cloudwatch_metric_alarm.errors["5xxErrors"].metric_query : one(query.metric).metric_name if length(query.metric) > 0
    ]) == toset(["5xxErrors", "AllRequests"])
    error_message = "not a share of all requests"
  }
  assert {
    condition     = length(output.alarm_names) == 6
    error_message = "an alarm is missing"
  }
}

run "nothing_that_costs_where_nothing_was_asked_for" {
  command = plan

  variables {
    destinations   = {}
    request_alarms = false
  }

  assert {
    condition     = length(output.alarm_names) == 0 && length(aws_s3_bucket_metric.requests) == 0
    error_message = "something is planned"
  }
}

run "share_above_one_is_refused" {
  command = plan

  variables {
    server_error_share = 5
  }

  expect_failures = [var.server_error_share]
}
