# SPDX-License-Identifier: Apache-2.0
# Alarms for what a corpus can suffer: copies that lag or fail, and requests that are refused.

locals {
  filter = "s3ec"
  shares = var.request_alarms ? {
    "4xxErrors" = var.client_error_share
    "5xxErrors" = var.server_error_share
  } : {}
}

resource "aws_cloudwatch_metric_alarm" "replication_latency" {
  for_each = var.destinations

  alarm_name          = "${var.name}-replication-latency-${each.key}"
  alarm_description   = "The copy of ${var.corpus.name} in ${each.value} lags: its readers encode what the writer has stored."
  namespace           = "AWS/S3"
  metric_name         = "ReplicationLatency"
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 3
  threshold           = var.replication_latency_s
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_actions
  ok_actions          = var.alarm_actions
  tags                = var.tags

  dimensions = {
    SourceBucket      = var.corpus.name
    DestinationBucket = each.value
    RuleId            = each.key
  }
}

resource "aws_cloudwatch_metric_alarm" "replication_failures" {
  for_each = var.destinations

  alarm_name          = "${var.name}-replication-failures-${each.key}"
  alarm_description   = "Objects of ${var.corpus.name} were not replicated to ${each.value}: look at the role and the keys, then run S3 Batch Replication."
  namespace           = "AWS/S3"
  metric_name         = "OperationsFailedReplication"
  statistic           = "Sum"
  period              = 300
  evaluation_periods  = 1
  threshold           = 0
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_actions
  ok_actions          = var.alarm_actions
  tags                = var.tags

  dimensions = {
    SourceBucket      = var.corpus.name
    DestinationBucket = each.value
    RuleId            = each.key
  }
}

resource "aws_s3_bucket_metric" "requests" {
  count = var.request_alarms ? 1 : 0

  bucket = var.corpus.name
  name   = local.filter

  dynamic "filter" {
    for_each = var.corpus.prefix == "" ? [] : [var.corpus.prefix]

    content {
      prefix = filter.value
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "errors" {
  for_each = local.shares

  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = "Over ${format("%.3g", each.value * 100)}% of the requests to ${var.corpus.name} end in ${each.key}; `s3ec doctor` names the reason."
  evaluation_periods  = 3
  threshold           = each.value
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_actions
  ok_actions          = var.alarm_actions
  tags                = var.tags

  metric_query {
    id          = "share"
    expression  = "errors / requests"
    label       = "share of requests"
    return_data = true
  }

  dynamic "metric_query" {
    for_each = { errors = each.key, requests = "AllRequests" }

    content {
      id = metric_query.key

      metric {
        namespace   = "AWS/S3"
        metric_name = metric_query.value
        stat        = "Sum"
        period      = 300
        dimensions  = { BucketName = var.corpus.name, FilterId = local.filter }
      }
    }
  }
}
