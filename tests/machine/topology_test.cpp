#include "oxytorch/machine/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "host_tree.h"
#include "oxytorch/error.h"
#include "oxytorch/machine.h"
#include "oxytorch/random.h"

namespace oxytorch::machine {
namespace {

using testing::HasSubstr;

std::string error_of(const std::string& json) {
  try {
    TopologyConfig::from_json(json);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Topology, ReadsSizesRatesAndDurations) {
  const auto config = TopologyConfig::from_yaml(R"(
nodes: 16
accelerators_per_node: 8
accelerator: H100 SXM
accelerator_memory: 80GB
node_link: nvlink
node_link_bandwidth: 450GB/s
node_link_latency: 1.5us
network: infiniband
network_bandwidth: 3200Gb/s
network_latency: 5e-6
host_memory: 2TiB
cores_per_node: 112
)",
                                                "file cluster.yaml");
  config.check();
  EXPECT_EQ(config.nodes(), 16);
  EXPECT_EQ(config.total_accelerators(), 128);
  EXPECT_EQ(config.whole("accelerator_memory"), 80'000'000'000);
  EXPECT_DOUBLE_EQ(config.number("network_bandwidth").value(), 4e11);
  EXPECT_DOUBLE_EQ(config.number("node_link_latency").value(), 1.5e-6);
  EXPECT_DOUBLE_EQ(config.total_accelerator_memory().value(), 128 * 80e9);
  EXPECT_DOUBLE_EQ(config.bisection_bytes_per_s().value(), 8 * 4e11);
  EXPECT_DOUBLE_EQ(config.network_bytes_per_s_per_accelerator().value(), 5e10);
  EXPECT_DOUBLE_EQ(config.host_memory_per_accelerator().value(), 0x1p41 / 8);
  EXPECT_DOUBLE_EQ(config.cores_per_accelerator().value(), 14);
  EXPECT_EQ(config.origin("nodes"), "file cluster.yaml");
  EXPECT_EQ(TopologyConfig::from_json(config.to_json()), config);
  for (const char* part : {"450 GB/s", "file cluster.yaml", "bisection bandwidth, one way", "3.2 TB/s", "14"}) {
    EXPECT_THAT(config.explain(), HasSubstr(part));
  }
}

TEST(Topology, WhatIsUnknownStaysUnknown) {
  TopologyConfig config;
  config.check();
  EXPECT_EQ(config.nodes(), 1);
  EXPECT_EQ(config.total_accelerators(), 0);
  EXPECT_FALSE(config.get("network") || config.total_accelerator_memory() || config.bisection_bytes_per_s());
  EXPECT_FALSE(config.network_bytes_per_s_per_accelerator() || config.cores_per_accelerator());
  EXPECT_TRUE(nlohmann::json::parse(config.to_json()).at("network").is_null());
  EXPECT_EQ(TopologyConfig::from_json(config.to_json()), config);
  config.set("accelerators_per_node", std::int64_t{4});
  config.set("node_link_bandwidth", std::string("300GB/s"));
  EXPECT_DOUBLE_EQ(config.bisection_bytes_per_s().value(), 6e11);  // one node: two pairs across the middle
  config.set("node_link_bandwidth", std::string("none"));
  EXPECT_FALSE(config.bisection_bytes_per_s());
}

TEST(Topology, RefusesWhatCannotBeMeantAndSaysWhatToDo) {
  for (const auto& [text, message] : std::vector<std::pair<std::string, std::string>>{
           {R"({"nods": 4})", "JSON text: unknown topology key 'nods'; did you mean 'nodes'?"},
           {R"({"nodes": 0})", "topology key 'nodes' must be a whole number from 1 to 16777216, not 0."},
           {R"({"nodes": -3})", "not -3."},
           {R"({"nodes": 1.5})", "not 1.5."},
           {R"({"nodes": "four"})", "not 'four'."},
           {R"({"nodes": true})", "not true."},
           {R"({"nodes": "none"})", "must be a whole number"},
           {R"({"nodes": 2, "nodes": 3})", "is there twice"},
           {R"({"network": "infiniban"})", "Did you mean 'infiniband'?"},
           {R"({"network_bandwidth": "400"})", "accepted"},
           {R"({"network_bandwidth": "400GB"})", "has the unknown unit 'GB'. Write '400Gb/s' (bits)"},
           {R"({"network_bandwidth": "fast"})", "does not start with a number"},
           {R"({"network_bandwidth": "-1Gb/s"})", "is negative"},
           {R"({"network_bandwidth": 0})", "not 0."},
           {R"({"network_bandwidth": "1e308Pb/s"})", "is too large"},
           {R"({"network_latency": "5 parsec"})", "has the unknown unit 'parsec'"},
           {R"({"host_memory": "90%"})", "not '90%'."},
           {R"({"host_memory": "2T"})", "does not say which unit"},
           {R"({"host_memory": [1]})", "is a list"},
           {"[]", "one flat mapping"},
           {"{", "not JSON"},
           {R"({"accelerator": "H100 SXM"})", "accelerators_per_node is 0; set accelerators_per_node"},
           {R"({"accelerators_per_node": 8, "cores_per_node": 4})", "each accelerator needs a core"}}) {
    EXPECT_THAT(error_of(text), HasSubstr(message)) << text;
  }
  TopologyConfig config;
  EXPECT_THROW(config.set("accelerator", std::string("a\nb")), Error);
  EXPECT_THROW(config.set("accelerator", std::string(129, 'a')), Error);
  EXPECT_THROW(TopologyConfig::from_file("/no/such/file.yaml"), Error);
  EXPECT_THROW(TopologyConfig::from_file("/tmp/topology.txt"), Error);
  EXPECT_EQ(config, TopologyConfig());
}

TEST(Topology, AnyTextIsReadOrRefused) {
  const std::string good =
      R"({"nodes": 16, "accelerators_per_node": 8, "network_bandwidth": "3200Gb/s", "host_memory": "2TiB"})";
  PhiloxStream random(/*seed=*/11);
  int accepted = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string text = good;
    for (std::uint32_t i = random.below(3) + 1; i > 0; --i) {
      // Half of the changes are bytes that a true text has.
      const bool any = random.below(2) == 0;
      text[random.below(static_cast<std::uint32_t>(text.size()))] =
          any ? static_cast<char>(random.below(256)) : good[random.below(static_cast<std::uint32_t>(good.size()))];
    }
    for (const bool yaml : {false, true}) {
      try {
        const auto config = yaml ? TopologyConfig::from_yaml(text) : TopologyConfig::from_json(text);
        EXPECT_EQ(TopologyConfig::from_json(config.to_json()), config) << text;
        EXPECT_FALSE(config.explain().empty());
        ++accepted;
      } catch (const Error& error) {
        EXPECT_NE(error.code(), ErrorCode::Internal) << text;
      }
    }
  }
  EXPECT_GT(accepted, 100);
}

backend::DeviceInfo device(const std::string& name, std::uint64_t bytes) { return {name, "", "cuda", bytes}; }

TEST(Topology, DetectsATorchrunNodeWithInfiniband) {
  HostTree tree;
  tree.processors(112);
  tree.memory(2048);
  for (const char* name : {"mlx5_0", "mlx5_1"}) {
    tree.adapter(name, "mlx5_core", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
  }
  tree.adapter("mlx5_2", "mlx5_core", "1: DOWN", "400 Gb/sec (4X NDR)", "InfiniBand");
  const auto config =
      TopologyConfig::detect({tree.root(),
                              {{{"WORLD_SIZE", "32"}, {"LOCAL_WORLD_SIZE", "8"}, {"SLURM_JOB_NUM_NODES", "9"}}},
                              std::vector<backend::DeviceInfo>(8, device("NVIDIA H100 80GB HBM3", 85'520'809'984))});
  config.check();
  EXPECT_EQ(config.nodes(), 4);
  EXPECT_EQ(config.origin("nodes"), "WORLD_SIZE");
  EXPECT_EQ(config.total_accelerators(), 32);
  EXPECT_EQ(config.whole("accelerator_memory"), 85'520'809'984);
  EXPECT_EQ(config.word("node_link"), "nvlink");
  EXPECT_DOUBLE_EQ(config.number("node_link_bandwidth").value(), 450e9);
  EXPECT_EQ(config.word("network"), "infiniband");
  EXPECT_DOUBLE_EQ(config.number("network_bandwidth").value(), 1e11);  // two of 400 Gb/s; the third is down
  EXPECT_EQ(config.whole("cores_per_node"), 112);
  EXPECT_EQ(config.whole("host_memory"), std::int64_t{2048} << 30);
  EXPECT_FALSE(config.get("network_latency"));
}

TEST(Topology, DetectsSlurmEfaAndPlainMachines) {
  HostTree tree;
  tree.processors(16);
  tree.memory(64);
  auto sources = TopologySources{
      tree.root(), {{{"SLURM_NNODES", "3"}, {"SLURM_GPUS_ON_NODE", "8"}}}, std::vector<backend::DeviceInfo>{}};
  sources.accelerators->push_back(device("GAUDI2", 0));
  auto config = TopologyConfig::detect(sources);
  EXPECT_EQ(config.nodes(), 3);
  EXPECT_EQ(config.accelerators_per_node(), 8);  // this task sees one of them
  EXPECT_EQ(config.whole("accelerator_memory"), 96'000'000'000);
  EXPECT_EQ(config.word("node_link"), "roce");
  tree.adapter("rdmap16s27", "efa", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Unspecified");
  EXPECT_EQ(TopologyConfig::detect(sources).word("network"), "efa");

  HostTree plain;
  plain.processors(4);
  plain.write({{"/sys/class/net/eth0/speed", "10000\n"},
               {"/sys/class/net/eth0/device/vendor", "0x8086\n"},
               {"/sys/class/net/docker0/speed", "40000\n"}});
  config =
      TopologyConfig::detect({plain.root(), std::map<std::string, std::string>{}, std::vector<backend::DeviceInfo>{}});
  config.check();
  EXPECT_EQ(config.nodes(), 1);
  EXPECT_EQ(config.total_accelerators(), 0);
  EXPECT_EQ(config.word("network"), "ethernet");
  EXPECT_DOUBLE_EQ(config.number("network_bandwidth").value(), 1.25e9);
}

TEST(Topology, DetectionMeetsAnyEnvironmentAndTree) {
  HostTree tree;
  tree.processors(2);
  tree.adapter("mlx5_0", "mlx5_core", "4: ACTIVE", "400 Gb/sec (4X NDR)", "Ethernet");
  for (const std::string value : {"", "0", "-1", "8x", "99999999999999999999", "9223372036854775807", "\xff", "nan"}) {
    tree.write("/sys/class/infiniband/mlx5_0/ports/1/rate", value + " Gb/sec");
    const auto config = TopologyConfig::detect(
        {tree.root(),
         {{{"WORLD_SIZE", value}, {"LOCAL_WORLD_SIZE", "1"}, {"SLURM_NNODES", value}, {"SLURM_GPUS_ON_NODE", value}}},
         {{device(value, UINT64_MAX), device("x", 1), device("y", 1)}}});
    config.check();
    EXPECT_GE(config.nodes(), 1);
    EXPECT_FALSE(config.explain().empty());
  }
  TopologyConfig::detect().check();
}

}  // namespace
}  // namespace oxytorch::machine
