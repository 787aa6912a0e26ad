#include "oxytorch/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "oxytorch/error.h"

namespace oxytorch::environment {
namespace {

using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Context for_backend(const std::string& backend) {
  Context context;
  context.backend = backend;
  return context;
}

std::string described(const std::vector<EnvironmentIssue>& issues) {
  std::string text;
  for (const EnvironmentIssue& one : issues) {
    text += std::string(name(one.severity)) + " " + name(one.verdict) + ": " + one.message + "\n";
  }
  return text;
}

/// The one issue for `name`.
EnvironmentIssue only(const std::vector<EnvironmentIssue>& issues, const std::string& name) {
  EnvironmentIssue found{};
  int count = 0;
  for (const EnvironmentIssue& one : issues) {
    if (one.name == name) {
      found = one;
      ++count;
    }
  }
  EXPECT_EQ(count, 1) << name << "\n" << described(issues);
  return found;
}

/// Warnings and errors; notes leave a run as it is.
std::vector<EnvironmentIssue> alarms(const std::vector<EnvironmentIssue>& issues) {
  std::vector<EnvironmentIssue> left;
  std::copy_if(issues.begin(), issues.end(), std::back_inserter(left),
               [](const EnvironmentIssue& one) { return one.severity != Severity::Note; });
  return left;
}

Verdict verdict(const std::string& name, const std::string& value, const Context& context = {}) {
  const auto issues = lint(Variables{{name, value}}, context);
  return issues.empty() ? Verdict::Fine : only(issues, name).verdict;
}

TEST(Registry, RowsAreWholeAndNamesDiffer) {
  std::set<std::string> names;
  for (const Setting& one : settings()) {
    EXPECT_TRUE(names.insert(one.name).second) << one.name;
    EXPECT_EQ(find(one.name), &one);
    EXPECT_FALSE(one.what.empty() || one.evidence.empty() || one.component.empty()) << one.name;
    EXPECT_EQ(one.what.back(), '.') << one.name;
    EXPECT_FALSE(one.allowed().empty()) << one.name;
    EXPECT_EQ(one.kind == Kind::Choice, !one.choices.empty()) << one.name;
    EXPECT_EQ(one.kind == Kind::Grammar, !one.grammar.empty()) << one.name;
    EXPECT_TRUE(one.replacement.empty() || find(one.replacement) != nullptr) << one.name << " -> " << one.replacement;
  }
  EXPECT_GT(names.size(), 900U);
  EXPECT_EQ(find("nccl_debug"), nullptr);
}

TEST(Registry, ItsDefaultsAreAccepted) {
  for (const Setting& one : settings()) {
    const bool number = !one.standard.empty() && (one.standard[0] == '-' || std::isdigit(one.standard[0]) != 0);
    const bool prose = one.standard.find(' ') != std::string::npos || one.standard == "cores" || one.standard == "AUTO";
    if (!(number || one.kind == Kind::Flag || one.kind == Kind::Choice) || prose || one.standard == "OMP_NUM_THREADS")
      continue;
    for (const EnvironmentIssue& issue : lint(Variables{{one.name, one.standard}})) {
      EXPECT_NE(issue.verdict, Verdict::BadValue) << issue.message;
    }
  }
}

// Each verdict on a name of the Gaudi bridge, of collectives and of the network under them.
struct Expected {
  const char* name;
  const char* value;
  const char* backend;
  Verdict verdict;
};

class KnownNames : public testing::TestWithParam<Expected> {};

TEST_P(KnownNames, AreJudgedRightly) {
  const Expected& one = GetParam();
  EXPECT_EQ(name(verdict(one.name, one.value, for_backend(one.backend))), std::string(name(one.verdict)))
      << one.name << "=" << one.value << "\n"
      << described(lint(Variables{{one.name, one.value}}, for_backend(one.backend)));
}

INSTANTIATE_TEST_SUITE_P(
    Gaudi, KnownNames,
    testing::Values(Expected{"PT_HPU_LAZY_MODE", "1", "hpu", Verdict::Fine},
                    Expected{"PT_HPU_LAZY_MODE", "0", "hpu", Verdict::Fine},
                    Expected{"PT_HPU_MAX_COMPOUND_OP_SIZE", "9223372036854775807", "hpu", Verdict::Fine},
                    Expected{"PT_HPU_MAX_COMPOUND_OP_SIZE", "256", "hpu", Verdict::Harmful},
                    Expected{"PT_HPU_ENABLE_WEIGHT_CPU_PERMUTE", "1", "hpu", Verdict::Fine},
                    Expected{"PT_HPU_POOL_STRATEGY", "4", "hpu", Verdict::Fine},
                    Expected{"PT_HPU_POOL_STRATEGY", "OPTIMIZE_UTILIZATION", "hpu", Verdict::BadValue},
                    Expected{"PT_HPU_POOL_STRATEGY", "5", "hpu", Verdict::BadValue},
                    Expected{"PT_HPU_ENABLE_LAZY_COMPILATION", "1", "hpu", Verdict::Unknown},
                    Expected{"PT_HPU_GRAPH_COMPILER_OPT_LEVEL", "3", "hpu", Verdict::Unknown},
                    Expected{"PT_HPU_ENABLE_SYNAPSE_LAYOUT_OPT", "1", "hpu", Verdict::Unknown},
                    Expected{"PT_HPU_ENABLE_COMPILATION_CACHE", "1", "hpu", Verdict::Unknown},
                    Expected{"PT_HPU_COMPILATION_CACHE_PATH", "/tmp/x", "hpu", Verdict::Unknown},
                    Expected{"PT_HPU_ENABLE_CONV_FLATTEN_OPT", "1", "hpu", Verdict::Unknown},
                    Expected{"PT_HPU_ENABLE_EAGER_EXECUTION", "0", "hpu", Verdict::Unknown},
                    Expected{"PT_HPU_ENABLE_DYNAMIC_COMPILATION", "1", "hpu", Verdict::Unknown},
                    Expected{"HABANA_ENABLE_GRADIENT_COMPRESSION", "1", "hpu", Verdict::Unknown},
                    Expected{"HABANA_COMM_BACKEND", "hccl", "hpu", Verdict::Unknown},
                    Expected{"HABANA_COMM_TOPOLOGY", "ring", "hpu", Verdict::Unknown},
                    Expected{"HABANA_ROCE_ENABLED", "1", "hpu", Verdict::Unknown},
                    Expected{"HCCL_RDMA_TC", "100", "hpu", Verdict::Unknown},
                    Expected{"HCCL_IF_IP", "10.0.0.1", "hpu", Verdict::Unknown},
                    Expected{"HCCL_OVER_OFI", "1", "hpu", Verdict::Harmful},
                    Expected{"PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/cache,True,1024", "hpu", Verdict::Fine},
                    Expected{"PT_HPU_RECIPE_CACHE_CONFIG", ",false,1024,false", "hpu", Verdict::Fine},
                    Expected{"PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/cache,maybe,1024", "hpu", Verdict::BadValue},
                    Expected{"PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/cache,true,much", "hpu", Verdict::BadValue},
                    Expected{"PT_HPU_POOL_MEM_ACQUIRE_PERC", "101", "hpu", Verdict::BadValue},
                    Expected{"PT_HPU_ENABLE_LAZY_COLLECTIVES", "true", "hpu", Verdict::Fine},
                    Expected{"PT_HPU_ENABLE_LAZY_COLLECTIVES", "yes", "hpu", Verdict::BadValue},
                    Expected{"PT_RECIPE_CACHE_PATH", "/tmp/x", "hpu", Verdict::Obsolete},
                    Expected{"FI_EFA_USE_DEVICE_RDMA", "0", "hpu", Verdict::Harmful},
                    Expected{"RDMAV_FORK_SAFE", "1", "hpu", Verdict::Fine},
                    Expected{"PT_COMPILE_ONLY_MODE", "1", "hpu", Verdict::Harmful}));

INSTANTIATE_TEST_SUITE_P(Collectives, KnownNames,
                         testing::Values(Expected{"NCCL_TREE_THRESHOLD", "0", "cuda", Verdict::Obsolete},
                                         Expected{"NCCL_MIN_NRINGS", "8", "cuda", Verdict::Obsolete},
                                         Expected{"NCCL_MIN_CTAS", "8", "cuda", Verdict::Fine},
                                         Expected{"NCCL_NET_GDR_LEVEL", "5", "cuda", Verdict::Harmful},
                                         Expected{"NCCL_NET_GDR_LEVEL", "2", "cuda", Verdict::Obsolete},
                                         Expected{"NCCL_NET_GDR_LEVEL", "PHB", "cuda", Verdict::Fine},
                                         Expected{"NCCL_NET_GDR_LEVEL", "FAR", "cuda", Verdict::BadValue},
                                         Expected{"NCCL_IB_DISABLE", "0", "cuda", Verdict::Fine},
                                         Expected{"NCCL_IB_DISABLE", "1", "cuda", Verdict::Harmful},
                                         Expected{"NCCL_SOCKET_IFNAME", "^docker,lo", "cuda", Verdict::Harmful},
                                         Expected{"NCCL_SOCKET_IFNAME", "eth0", "cuda", Verdict::Fine},
                                         Expected{"NCCL_PROTO", "simple", "cuda", Verdict::Harmful},
                                         Expected{"NCCL_PROTO", "LL128", "cuda", Verdict::Harmful},
                                         Expected{"FI_EFA_FORK_SAFE", "1", "cuda", Verdict::Obsolete},
                                         Expected{"FI_EFA_USE_DEVICE_RDMA", "1", "cuda", Verdict::Harmful},
                                         Expected{"FI_PROVIDER", "efa", "cuda", Verdict::Obsolete},
                                         Expected{"FI_PROVIDER", "efa", "hpu", Verdict::Fine},
                                         Expected{"RDMAV_FORK_SAFE", "1", "cuda", Verdict::Harmful},
                                         Expected{"NCCL_DEBUG", "TRACE", "cuda", Verdict::Harmful},
                                         Expected{"NCCL_DEBUG", "WARN", "cuda", Verdict::Fine},
                                         Expected{"NCCL_DEBUG", "LOUD", "cuda", Verdict::BadValue},
                                         Expected{"NCCL_P2P_DISABLE", "1", "cuda", Verdict::Harmful},
                                         Expected{"NCCL_IB_DISABLE", "true", "cuda", Verdict::BadValue},
                                         Expected{"NCCL_DEBG", "INFO", "cuda", Verdict::Unknown},
                                         Expected{"NCCL_TIMEOUT", "1800", "cuda", Verdict::Unknown},
                                         Expected{"NCCL_AVOID_RECORD_STREAMS", "1", "cuda", Verdict::Unknown},
                                         Expected{"PT_HPU_DISABLE_pass_fuse", "True", "hpu", Verdict::Fine},
                                         Expected{"NCCL_IBEXT_DISABLE", "1", "cuda", Verdict::Fine},
                                         Expected{"NCCL_RINGS_MAX", "4", "cuda", Verdict::Unknown},
                                         Expected{"NCCL_HOME", "/usr", "cuda", Verdict::Fine},
                                         Expected{"NCCL_ASYNC_ERROR_HANDLING", "1", "cuda", Verdict::Obsolete},
                                         Expected{"OFI_NCCL_ROUND_ROBIN_THRESHOLD", "8192", "cuda", Verdict::Obsolete},
                                         Expected{"TORCH_NCCL_BLOCKING_WAIT", "1", "cuda", Verdict::Harmful}));

INSTANTIATE_TEST_SUITE_P(
    Host, KnownNames,
    testing::Values(Expected{"OMP_NUM_THREADS", "0", "cpu", Verdict::BadValue},
                    Expected{"OMP_NUM_THREADS", "8,2", "cpu", Verdict::Fine},
                    Expected{"OMP_PROC_BIND", "spread,close", "cpu", Verdict::Fine},
                    Expected{"OMP_PROC_BIND", "1", "cpu", Verdict::BadValue},
                    Expected{"OMP_PLACES", "cores(4)", "cpu", Verdict::Fine},
                    Expected{"OMP_PLACES", "{0,1},{2:2}:4:2", "cpu", Verdict::Fine},
                    Expected{"OMP_PLACES", "{0,1", "cpu", Verdict::BadValue},
                    Expected{"OMP_PLACES", "core", "cpu", Verdict::BadValue},
                    Expected{"OMP_DYNAMIC", "1", "cpu", Verdict::BadValue},
                    Expected{"OMP_SCHEDULE", "dynamic,4", "cpu", Verdict::Fine},
                    Expected{"OMP_SCHEDULE", "magic", "cpu", Verdict::BadValue},
                    Expected{"OMP_STACKSIZE", "16M", "cpu", Verdict::Fine},
                    Expected{"OMP_STACKSIZE", "16Q", "cpu", Verdict::BadValue},
                    Expected{"OMP_NESTED", "true", "cpu", Verdict::Obsolete},
                    Expected{"GOMP_CPU_AFFINITY", "0 3 1-2 4-15:2", "cpu", Verdict::Fine},
                    Expected{"GOMP_CPU_AFFINITY", "0-", "cpu", Verdict::BadValue},
                    Expected{"GOMP_CPU_AFFINITY", "3-1", "cpu", Verdict::BadValue},
                    Expected{"OMP_NUM_THREAD", "4", "cpu", Verdict::Unknown},
                    Expected{"KMP_BLOCKTIME", "0", "cpu", Verdict::Harmful},
                    Expected{"MALLOC_ARENA_MAX", "2", "cpu", Verdict::Fine},
                    Expected{"MALLOC_ARENA_MAX", "few", "cpu", Verdict::BadValue},
                    Expected{"MALLOC_PERTURB_", "55", "cpu", Verdict::Harmful},
                    Expected{"MALLOC_TRIM_THRESHOLD", "1", "cpu", Verdict::Unknown},
                    Expected{"GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0", "cpu",
                             Verdict::Fine},
                    Expected{"GLIBC_TUNABLES", "glibc.malloc.arena_mx=2", "cpu", Verdict::BadValue},
                    Expected{"GLIBC_TUNABLES", "glibc.rtld.nns=99", "cpu", Verdict::BadValue},
                    Expected{"ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", "cpu", Verdict::Fine},
                    Expected{"ONEDNN_MAX_CPU_ISA", "AVX512", "cpu", Verdict::BadValue},
                    Expected{"DNNL_VERBOSE", "1", "cpu", Verdict::Obsolete},
                    Expected{"TORCHINDUCTOR_MAX_AUTOTUNE", "true", "cpu", Verdict::BadValue},
                    Expected{"TORCH_DISTRIBUTED_DEBUG", "detail", "cpu", Verdict::BadValue},
                    Expected{"TORCH_DISTRIBUTED_DEBUG", "DETAIL", "cpu", Verdict::Harmful},
                    Expected{"MASTER_PORT", "70000", "cpu", Verdict::BadValue},
                    Expected{"PATH", "/bin", "cpu", Verdict::Fine}, Expected{"MY_NCCL_DEBG", "1", "cpu", Verdict::Fine},
                    Expected{"TORCH_MY_OWN", "1", "cpu", Verdict::Fine},
                    Expected{"OMP_PREFIX", "x", "cpu", Verdict::Fine}));

INSTANTIATE_TEST_SUITE_P(
    Cuda, KnownNames,
    testing::Values(Expected{"CUDA_LAUNCH_BLOCKING", "1", "cuda", Verdict::Harmful},
                    Expected{"CUDA_VISIBLE_DEVICES", "0,1", "cuda", Verdict::Fine},
                    Expected{"CUDA_VISIBLE_DEVICES", "0,0", "cuda", Verdict::BadValue},
                    Expected{"CUDA_VISIBLE_DEVICES", "gpu0", "cuda", Verdict::BadValue},
                    Expected{"CUDA_VISIBLE_DEVICES", "", "cuda", Verdict::Harmful},
                    Expected{"CUDA_VISIBLE_DEVICES", "-1", "cpu", Verdict::Fine},
                    Expected{"CUBLAS_WORKSPACE_CONFIG", ":4096:8", "cuda", Verdict::Fine},
                    Expected{"CUBLAS_WORKSPACE_CONFIG", "4096:8", "cuda", Verdict::BadValue},
                    Expected{"PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "cuda", Verdict::Fine},
                    Expected{"PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,garbage_collection_threshold:0.8",
                             "cuda", Verdict::Fine},
                    Expected{"PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "cuda",
                             Verdict::Fine},
                    Expected{"PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:[256:3]", "cuda", Verdict::BadValue},
                    Expected{"PYTORCH_CUDA_ALLOC_CONF", "expandable_segment:True", "cuda", Verdict::BadValue},
                    Expected{"PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:true", "cuda", Verdict::BadValue},
                    Expected{"PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:10", "cuda", Verdict::BadValue},
                    Expected{"PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:1.5", "cuda", Verdict::BadValue},
                    Expected{"PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync,expandable_segments:True", "cuda",
                             Verdict::Contradicting},
                    Expected{"MALLOC_CONF", "background_thread:true,dirty_decy_ms:1", "cuda", Verdict::BadValue},
                    Expected{"PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "cuda", Verdict::Harmful}));

TEST(Judge, SaysWhatWhichAndWhatToDo) {
  const EnvironmentIssue rings = only(lint(Variables{{"NCCL_MIN_NRINGS", "8"}}), "NCCL_MIN_NRINGS");
  EXPECT_EQ(rings.severity, Severity::Warning);
  EXPECT_EQ(rings.replacement, "NCCL_MIN_CTAS");
  EXPECT_THAT(rings.message, HasSubstr("NCCL_MIN_NRINGS=8"));
  EXPECT_THAT(rings.message, HasSubstr("2.17"));
  EXPECT_THAT(rings.message, HasSubstr("set NCCL_MIN_CTAS"));

  const EnvironmentIssue pool =
      only(lint(Variables{{"PT_HPU_POOL_STRATEGY", "OPTIMIZE_UTILIZATION"}}), "PT_HPU_POOL_STRATEGY");
  EXPECT_EQ(pool.severity, Severity::Error);
  EXPECT_THAT(pool.message, HasSubstr("'0' or '4'"));

  const EnvironmentIssue slip = only(lint(Variables{{"PT_HPU_LAZY_MOD", "1"}}), "PT_HPU_LAZY_MOD");
  EXPECT_EQ(slip.replacement, "PT_HPU_LAZY_MODE");
  EXPECT_THAT(slip.message, HasSubstr("Did you mean PT_HPU_LAZY_MODE?"));

  const EnvironmentIssue huawei = only(lint(Variables{{"HCCL_RDMA_SL", "4"}}), "HCCL_RDMA_SL");
  EXPECT_THAT(huawei.message, HasSubstr("Ascend"));
}

TEST(Judge, CountsVersions) {
  const auto with = [](const std::string& component, const std::string& version) {
    Context context = for_backend("cuda");
    context.versions[component] = version;
    return context;
  };
  EXPECT_EQ(verdict("NCCL_TREE_THRESHOLD", "0", with("nccl", "2.4.8")), Verdict::Fine);
  EXPECT_EQ(verdict("NCCL_MIN_NRINGS", "8", with("nccl", "2.16.5")), Verdict::Fine);
  EXPECT_EQ(verdict("NCCL_MIN_NRINGS", "8", with("nccl", "2.17.1")), Verdict::Obsolete);
  EXPECT_EQ(verdict("NCCL_CTA_POLICY", "EFFICIENCY", with("nccl", "2.21.5")), Verdict::Unknown);
  EXPECT_EQ(verdict("NCCL_CTA_POLICY", "EFFICIENCY", with("nccl", "2.27.3")), Verdict::Fine);
  EXPECT_EQ(verdict("NCCL_PROTO", "simple", with("aws-ofi-nccl", "1.5.0")), Verdict::Fine);
  EXPECT_EQ(verdict("NCCL_PROTO", "simple", with("aws-ofi-nccl", "1.9.1")), Verdict::Harmful);
  EXPECT_EQ(verdict("FI_PROVIDER", "efa", with("aws-ofi-nccl", "1.5.0-aws")), Verdict::Fine);
  EXPECT_EQ(verdict("FI_EFA_USE_DEVICE_RDMA", "1", with("aws-ofi-nccl", "1.6.0")), Verdict::Fine);
  EXPECT_EQ(verdict("FI_EFA_USE_DEVICE_RDMA", "1", with("libfabric", "1.22.0")), Verdict::Harmful);
}

TEST(Judge, FindsWhatContradicts) {
  const auto other = [](const Variables& variables, const std::string& name, const Context& context = {}) {
    const EnvironmentIssue found = only(lint(variables, context), name);
    EXPECT_EQ(found.verdict, Verdict::Contradicting) << found.message;
    return found.other;
  };
  EXPECT_EQ(other({{"OMP_PROC_BIND", "close"}, {"GOMP_CPU_AFFINITY", "0-3"}}, "GOMP_CPU_AFFINITY"), "OMP_PROC_BIND");
  EXPECT_EQ(other({{"OMP_PROC_BIND", "false"}, {"OMP_PLACES", "cores"}}, "OMP_PROC_BIND"), "OMP_PLACES");
  EXPECT_EQ(
      other({{"TORCH_NCCL_BLOCKING_WAIT", "1"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"}}, "TORCH_NCCL_BLOCKING_WAIT"),
      "TORCH_NCCL_ASYNC_ERROR_HANDLING");
  EXPECT_EQ(
      other({{"TORCH_NCCL_DESYNC_DEBUG", "1"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"}}, "TORCH_NCCL_DESYNC_DEBUG"),
      "TORCH_NCCL_ASYNC_ERROR_HANDLING");
  EXPECT_EQ(
      other({{"PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"}, {"PYTORCH_ALLOC_CONF", "max_split_size_mb:64"}},
            "PYTORCH_CUDA_ALLOC_CONF"),
      "PYTORCH_ALLOC_CONF");
  EXPECT_EQ(other({{"PT_HPU_LAZY_MODE", "1"}, {"ACCELERATE_DYNAMO_BACKEND", "hpu_backend"}}, "PT_HPU_LAZY_MODE"),
            "ACCELERATE_DYNAMO_BACKEND");
  Context compiled = for_backend("hpu");
  compiled.compile = true;
  EXPECT_EQ(other({{"PT_HPU_LAZY_MODE", "1"}}, "PT_HPU_LAZY_MODE", compiled), "torch.compile");
  EXPECT_EQ(other({{"RANK", "4"}, {"WORLD_SIZE", "4"}}, "RANK"), "WORLD_SIZE");
  EXPECT_EQ(other({{"MASTER_ADDR", "localhost"}, {"SLURM_NNODES", "4"}}, "MASTER_ADDR"), "SLURM_NNODES");
  EXPECT_EQ(other({{"LD_PRELOAD", "/usr/lib/libjemalloc.so.2"}, {"MALLOC_ARENA_MAX", "2"}}, "MALLOC_ARENA_MAX"),
            "LD_PRELOAD");
  EXPECT_EQ(other({{"GLIBC_TUNABLES", "glibc.malloc.arena_max=4"}, {"MALLOC_ARENA_MAX", "2"}}, "MALLOC_ARENA_MAX"),
            "GLIBC_TUNABLES");
  EXPECT_EQ(other({{"NCCL_SOCKET_NTHREADS", "16"}, {"NCCL_NSOCKS_PERTHREAD", "8"}}, "NCCL_SOCKET_NTHREADS"),
            "NCCL_NSOCKS_PERTHREAD");
  EXPECT_EQ(other({{"NVIDIA_TF32_OVERRIDE", "0"}, {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"}}, "NVIDIA_TF32_OVERRIDE"),
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE");
}

TEST(Judge, KnowsTheMachine) {
  Context two;
  two.cores = 2;
  EXPECT_EQ(verdict("OMP_NUM_THREADS", "8", two), Verdict::Harmful);
  EXPECT_EQ(verdict("OMP_NUM_THREADS", "2", two), Verdict::Fine);
  EXPECT_EQ(verdict("TORCHINDUCTOR_COMPILE_THREADS", "32", two), Verdict::Harmful);
  Context libiomp;
  libiomp.openmp = "libiomp5";
  EXPECT_EQ(verdict("KMP_BLOCKTIME", "1", libiomp), Verdict::Fine);
  Context determinism = for_backend("cuda");
  determinism.determinism = true;
  EXPECT_EQ(verdict("CUBLAS_WORKSPACE_CONFIG", ":1024:2", determinism), Verdict::Harmful);
  EXPECT_EQ(verdict("CUBLAS_WORKSPACE_CONFIG", ":16:8", determinism), Verdict::Fine);
  Context efa = for_backend("cuda");
  efa.efa = true;
  EXPECT_EQ(verdict("NCCL_BUFFSIZE", "8388608", efa), Verdict::Harmful);
  EXPECT_EQ(verdict("NCCL_IB_DISABLE", "1", efa), Verdict::Fine);
}

TEST(Judge, GuessesTheDeviceFromTheNames) {
  const Variables gaudi = {{"FI_EFA_USE_DEVICE_RDMA", "1"}, {"RDMAV_FORK_SAFE", "1"}, {"PT_HPU_LAZY_MODE", "0"}};
  EXPECT_EQ(described(lint(gaudi)), "");
  const Variables nvidia = {{"FI_EFA_USE_DEVICE_RDMA", "1"}, {"RDMAV_FORK_SAFE", "1"}, {"NCCL_DEBUG", "WARN"}};
  EXPECT_EQ(lint(nvidia).size(), 2U) << described(lint(nvidia));
  EXPECT_EQ(described(lint(Variables{{"FI_EFA_USE_DEVICE_RDMA", "1"}, {"RDMAV_FORK_SAFE", "1"}})), "");
}

// What optimum-habana 1.22 sets itself or tells its users to, in examples and tests.
const Variables kOptimumHabana[] = {
    {{"PT_HPU_LAZY_MODE", "1"}, {"PT_HPU_ENABLE_LAZY_COLLECTIVES", "true"}, {"EXPERIMENTAL_WEIGHT_SHARING", "FALSE"}},
    {{"PT_HPU_LAZY_MODE", "0"},
     {"PT_HPU_TC_MODE", "1"},
     {"PT_TE_CUSTOM_OP", "1"},
     {"PT_HPU_FP8_MINIMIZE_MEMORY", "true"}},
    {{"PT_HPU_MAX_COMPOUND_OP_SIZE", "1"}, {"PT_HPU_MAX_COMPOUND_OP_SYNC", "1"}, {"PT_HPU_LAZY_MODE", "1"}},
    {{"PT_HPU_MAX_COMPOUND_OP_SIZE", "10"}, {"PT_ENABLE_INT64_SUPPORT", "1"}, {"HCCL_OVER_OFI", "1"}},
    {{"PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/stdxl_recipe_cache,True,1024"}, {"PT_HPUGRAPH_DISABLE_TENSOR_CACHE", "1"}},
    {{"PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "ops_bf16.txt"}, {"PT_HPU_AUTOCAST_FP32_OPS_LIST", "ops_fp32.txt"}},
    {{"PT_HPU_ENABLE_H2D_DYNAMIC_SLICE", "0"},
     {"PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES", "1"},
     {"GRAPH_VISUALIZATION", "true"}},
    {{"ENABLE_EXPERIMENTAL_FLAGS", "true"},
     {"ENABLE_LB_BUNDLE_ALL_COMPUTE_MME", "0"},
     {"ENABLE_CONST_MARKING", "True"}},
    {{"QUANT_CONFIG", "./quantization_config/maxabs_quant.json"},
     {"TOKENIZERS_PARALLELISM", "false"},
     {"WANDB_DISABLED", "true"}},
    {{"HABANA_VISIBLE_DEVICES", "all"},
     {"HABANA_VISIBLE_MODULES", "0,1,2,3"},
     {"ENABLE_CONSOLE", "true"},
     {"LOG_LEVEL_ALL", "4"}},
    {{"TORCH_DISTRIBUTED_DEBUG", "INFO"},
     {"NCCL_ASYNC_ERROR_HANDLING", "1"},
     {"DEEPSPEED_USE_HABANA_FRAMEWORKS_DETERMINISTIC_API", "1"}},
    {{"FLASH_ATTENTION_RECOMPUTE", "1"},
     {"ACCELERATE_USE_DEEPSPEED", "true"},
     {"ACCELERATE_MIXED_PRECISION", "no"},
     {"PATCH_SDPA", "1"}},
};

TEST(NoFalseAlarm, OverOptimumHabana) {
  for (const Variables& one : kOptimumHabana) {
    EXPECT_EQ(described(alarms(lint(one))), "");
    EXPECT_EQ(described(alarms(lint(one, for_backend("hpu")))), "");
  }
}

// Exactly what torchrun gives each worker: torch 2.13, elastic/agent/server/local_elastic_agent.py.
const Variables kTorchrun = {
    {"LOCAL_RANK", "0"},
    {"RANK", "0"},
    {"GROUP_RANK", "0"},
    {"ROLE_RANK", "0"},
    {"ROLE_NAME", "default"},
    {"LOCAL_WORLD_SIZE", "8"},
    {"WORLD_SIZE", "16"},
    {"GROUP_WORLD_SIZE", "2"},
    {"ROLE_WORLD_SIZE", "16"},
    {"MASTER_ADDR", "10.0.0.1"},
    {"MASTER_PORT", "29500"},
    {"TORCHELASTIC_RESTART_COUNT", "0"},
    {"TORCHELASTIC_MAX_RESTARTS", "3"},
    {"TORCHELASTIC_RUN_ID", "none"},
    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
    {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
    {"TORCHELASTIC_ERROR_FILE", "/tmp/torchelastic/error.json"},
    {"OMP_NUM_THREADS", "1"},
    {"TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
};

const Variables kShell = {
    {"PATH", "/usr/bin:/bin"},
    {"HOME", "/home/user"},
    {"SHELL", "/bin/bash"},
    {"USER", "user"},
    {"LANG", "C.UTF-8"},
    {"TERM", "xterm"},
    {"PWD", "/"},
    {"OLDPWD", "/"},
    {"SHLVL", "1"},
    {"_", "/usr/bin/env"},
    {"LOGNAME", "user"},
    {"LD_LIBRARY_PATH", "/usr/local/cuda/lib64"},
    {"CUDA_HOME", "/usr/local/cuda"},
    {"CUDA_PATH", "/usr/local/cuda"},
    {"CUDA_VERSION", "12.8.1"},
    {"NVIDIA_VISIBLE_DEVICES", "all"},
    {"NVIDIA_DRIVER_CAPABILITIES", "compute,utility"},
    {"NCCL_VERSION", "2.25.1-1"},
    {"NVIDIA_REQUIRE_CUDA", "cuda>=12.8"},
    {"NV_LIBNCCL_PACKAGE_VERSION", "2.25.1-1"},
    {"SLURM_JOB_ID", "1"},
    {"SLURM_NNODES", "1"},
    {"SLURM_PROCID", "0"},
    {"SLURM_LOCALID", "0"},
    {"LC_ALL", "C"},
    {"PYTHONPATH", "."},
    {"VIRTUAL_ENV", "/venv"},
    {"CONDA_PREFIX", "/conda"},
    {"EDITOR", "vi"},
    {"DISPLAY", ":0"},
    {"GC_KERNEL_PATH", "/usr/lib/habanalabs/libtpc_kernels.so"},
    {"HABANA_LOGS", "/var/log/habana_logs/"},
    {"HABANA_SCAL_BIN_PATH", "/opt/habanalabs/engines_fw"},
    {"HABANA_PLUGINS_LIB_PATH", "/opt/habanalabs/habana_plugins"},
    {"MKLROOT", "/opt/intel"},
    {"TORCH_CUDA_ARCH_LIST", "8.0 9.0+PTX"},
    {"TORCH_HOME", "/cache"},
    {"MALLOC_MMAP", "x"},
};

TEST(NoFalseAlarm, OverTorchrunAndAPlainShell) {
  Context context;
  context.cores = 16;
  for (const char* backend : {"", "cuda", "hpu", "cpu"}) {
    context.backend = backend;
    EXPECT_EQ(described(lint(kTorchrun, context)), "") << backend;
    EXPECT_EQ(described(lint(kShell, context)), "") << backend;
  }
}

TEST(Presets, AreKnownNamesThatTheJudgeLeavesAlone) {
  for (const char* goal : {"throughput", "latency"}) {
    for (const char* device : {"cuda", "hpu", "cpu"}) {
      for (const int processes : {1, 8}) {
        PresetOptions options;
        options.cores = 64;
        options.processes = processes;
        options.efa = options.jemalloc = true;
        options.recipe_cache = "/tmp/recipe cache";
        const Preset made = preset(goal, device, options);
        Context context = for_backend(device);
        context.cores = 64;
        context.openmp = "libgomp";
        context.compile = true;
        Variables variables;
        for (const PresetSetting& one : made.settings) {
          EXPECT_NE(find(one.name), nullptr) << one.name;
          EXPECT_FALSE(one.reason.empty() || one.evidence.empty()) << one.name;
          variables[one.name] = one.value;
        }
        EXPECT_FALSE(made.advice.empty());
        EXPECT_LE(made.settings.size(), 6U);
        EXPECT_EQ(described(lint(variables, context)), "") << goal << " on " << device;
        // Its text is read back to the same settings.
        Variables read;
        for (const Assignment& one : read_script(shell_text(made))) read[one.name] = one.value;
        EXPECT_EQ(read, variables);
      }
    }
  }
}

TEST(Presets, RefuseWhatTheyDoNotKnow) {
  EXPECT_THROW(preset("speed", "cuda"), Error);
  EXPECT_THROW(preset("latency", "tpu"), Error);
  PresetOptions options;
  options.cores = 0;
  EXPECT_THROW(preset("latency", "cpu", options), Error);
}

// Any name and value: no crash, and every issue names what it judges.
TEST(Judge, TakesAnyText) {
  std::mt19937_64 random(20);
  const std::string letters =
      "NCLHPU_TORMFIE01=:,[]{}>-.\"'\\\n\t \xff"
      "abkMG%$";
  const auto text = [&](std::size_t most) {
    std::string made(random() % most, ' ');
    for (char& c : made) c = letters[random() % letters.size()];
    return made;
  };
  const auto& all = settings();
  for (int round = 0; round < 600; ++round) {
    Variables variables;
    for (int i = 0; i < 6; ++i) {
      std::string key = i % 2 == 0 ? all[random() % all.size()].name : "NCCL_" + text(12);
      if (random() % 8 == 0 && !key.empty()) key[random() % key.size()] = letters[random() % letters.size()];
      variables[key] = text(24);
    }
    for (const EnvironmentIssue& one : lint(variables)) {
      EXPECT_TRUE(variables.count(one.name) == 1);
      EXPECT_FALSE(one.message.empty());
    }
  }
}

}  // namespace
}  // namespace oxytorch::environment
