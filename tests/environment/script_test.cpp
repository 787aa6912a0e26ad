#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "oxytorch/environment.h"

namespace oxytorch::environment {
namespace {

/// "3 NAME=value", "3 NAME=?" where it depends on the run, "3 -NAME" for unset, with @ and its number in a command.
std::vector<std::string> read(const std::string& text) {
  std::vector<std::string> lines;
  for (const Assignment& one : read_script(text, "job.sh")) {
    EXPECT_EQ(one.file, "job.sh");
    std::string line = std::to_string(one.line) + " ";
    if (one.scope != 0) line += "@" + std::to_string(one.scope) + " ";
    lines.push_back(line + (one.removed ? "-" + one.name : one.name + "=" + (one.exact ? one.value : "?")));
  }
  return lines;
}

using Lines = std::vector<std::string>;

TEST(Script, ReadsAssignments) {
  EXPECT_EQ(read("export A=1\nB=2 # no\n# C=3\n  export D=4 E=5; F=6 && G=7\n"),
            (Lines{"1 A=1", "2 B=2", "4 D=4", "4 E=5", "4 F=6", "4 G=7"}));
  EXPECT_EQ(read("declare -x A=1\nreadonly B=2\nexport -n A\nunset B C\n"),
            (Lines{"1 A=1", "2 B=2", "3 -A", "4 -B", "4 -C"}));
  EXPECT_EQ(read("A=1\r\nexport B=2\r\n"), (Lines{"1 A=1", "2 B=2"}));
  EXPECT_EQ(read("if true; then export A=1; else A=2; fi\nfor i in 1 2; do B=$i; done\n"),
            (Lines{"1 A=1", "1 A=2", "2 B=?"}));
  EXPECT_EQ(read("A=1\nA+=2\n"), (Lines{"1 A=1", "2 A=12"}));
}

TEST(Script, ReadsQuotesAndContinuedLines) {
  EXPECT_EQ(read("export A='x y' B=\"a\\\"b\" C=a\\ b D=''\n"), (Lines{"1 A=x y", "1 B=a\"b", "1 C=a b", "1 D="}));
  EXPECT_EQ(read("export A=1 \\\n  B=2 \\\n  C=3\nD=4\n"), (Lines{"1 A=1", "2 B=2", "3 C=3", "4 D=4"}));
  EXPECT_EQ(read("A='one\ntwo'\nB=3\n"), (Lines{"1 A=one\ntwo", "3 B=3"}));
  EXPECT_EQ(read("A=a#b\necho 'export B=1' \"C=2\"\n"), (Lines{"1 A=a#b"}));
}

TEST(Script, ExpandsWhatItKnows) {
  EXPECT_EQ(read("A=5\nexport B=$A C=${A}x D=\"${A:-9}\" E=${F:-7} G=${H} I=$(hostname) J=`id` K=$1\n"),
            (Lines{"1 A=5", "2 B=5", "2 C=5x", "2 D=5", "2 E=7", "2 G=?", "2 I=?", "2 J=?", "2 K=?"}));
  EXPECT_EQ(read("A=${B:-${C:-2}}\nD=$((1 + 2))\nE='$A'\n"), (Lines{"1 A=2", "2 D=?", "3 E=$A"}));
  EXPECT_EQ(read("A=$(scontrol show hostnames \"$X\" | head -n 1)\nB=2\n"), (Lines{"1 A=?", "2 B=2"}));
  EXPECT_EQ(read("A=(x y z)\nB=1\n"), (Lines{"2 B=1"}));
}

TEST(Script, KeepsWhatACommandSeesApart) {
  EXPECT_EQ(read("A=1 B=2 python x.py\nenv -u A C=3 D=4 python y.py --lr=1\nexec env E=5 z\n"),
            (Lines{"1 @1 A=1", "1 @1 B=2", "2 @2 -A", "2 @2 C=3", "2 @2 D=4", "3 @3 E=5"}));
  EXPECT_EQ(read("mpirun -np 4 -x A=1 -x B python x\ndocker run -e C=2 --env D=3 --env=E=4 image\n"),
            (Lines{"1 @1 A=1", "2 @2 C=2", "2 @2 D=3", "2 @2 E=4"}));
  EXPECT_EQ(read("python x.py --set A=1\n"), Lines{});
}

TEST(Script, ReadsSlurm) {
  EXPECT_EQ(read("#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --export=ALL,A=1,B=2\n# SBATCH --export=C=3\nsrun "
                 "--export=ALL,D=4 python x\n"),
            (Lines{"3 A=1", "3 B=2", "5 @1 D=4"}));
  EXPECT_EQ(read("srun --export A=1,B=2 --ntasks 4 env C=3 python x\n"), (Lines{"1 @1 A=1", "1 @1 B=2", "1 @1 C=3"}));
}

TEST(Script, PassesOverRedirectionsAndDocuments) {
  EXPECT_EQ(read("cat > f <<EOF\nexport A=1\nEOF\nexport B=2 2>&1 > log\ncat <<-'X'\n\tC=3\n\tX\nD=4\n"),
            (Lines{"4 B=2", "8 D=4"}));
  EXPECT_EQ(read("A=1 > x\nB=2 >> y; C=3 < z\n"), (Lines{"1 A=1", "2 B=2", "2 C=3"}));
}

TEST(Script, IsJudgedByLine) {
  const auto issues =
      lint(read_script("export NCCL_DEBUG=WARN\nexport NCCL_P2P_DISABLE=1\nNCCL_MIN_NRINGS=4 python train.py\nexport "
                       "OMP_PROC_BIND=close\n"
                       "GOMP_CPU_AFFINITY=0-3 python eval.py\n",
                       "job.sh"));
  std::vector<std::string> said;
  for (const EnvironmentIssue& one : issues)
    said.push_back(std::to_string(one.line) + " " + one.name + " " + name(one.verdict));
  EXPECT_EQ(said,
            (Lines{"2 NCCL_P2P_DISABLE harmful", "3 NCCL_MIN_NRINGS obsolete", "5 GOMP_CPU_AFFINITY contradicting"}));
}

TEST(Script, JudgesWhatIsInForce) {
  EXPECT_TRUE(
      lint(read_script("export OMP_PROC_BIND=close\nunset OMP_PROC_BIND\nexport GOMP_CPU_AFFINITY=0-3\n")).empty());
  EXPECT_EQ(lint(read_script("export NCCL_P2P_DISABLE=1\npython a.py\nexport NCCL_P2P_DISABLE=0\n")).size(), 1U);
  EXPECT_TRUE(lint(read_script("export NCCL_P2P_DISABLE=$OFF NCCL_DEBUG=$(cat level)\n")).empty());
}

TEST(Script, LeavesItsOwnVariablesAlone) {
  const auto unknown = [](const std::string& text) { return lint(read_script(text)).size(); };
  EXPECT_EQ(unknown("NCCL_TESTED=1\necho $NCCL_TESTED\n"), 0U);
  EXPECT_EQ(unknown("NCCL_TESTED=1\nexport NCCL_TESTED\n"), 1U);
  EXPECT_EQ(unknown("set -euo pipefail\nNCCL_TESTED=1\n"), 0U);
  EXPECT_EQ(unknown("set -ea\nNCCL_TESTED=1\n"), 1U);
  EXPECT_EQ(unknown("# for --env-file\nNCCL_TESTED=1\n"), 1U);
  EXPECT_EQ(unknown("declare NCCL_TESTED=1\ndeclare -x NCCL_TRIED=1\n"), 1U);
  EXPECT_EQ(unknown("NCCL_TESTED=1 python x.py\n"), 1U);
  EXPECT_EQ(unknown("#SBATCH --export=ALL,NCCL_TESTED=1\n"), 1U);
  // Known ones may have been exported before.
  EXPECT_EQ(unknown("NCCL_P2P_DISABLE=1\npython x.py\n"), 1U);
}

// Any bytes: it ends, gives names only, and lines that are there.
TEST(Script, TakesAnyText) {
  std::mt19937_64 random(4);
  const std::vector<std::string> parts = {"export ",
                                          "A=",
                                          "B=1",
                                          "$",
                                          "${",
                                          "}",
                                          "(",
                                          ")",
                                          "'",
                                          "\"",
                                          "`",
                                          "\\",
                                          "\n",
                                          " ",
                                          "#",
                                          "#SBATCH --export=",
                                          "srun --export=",
                                          "env ",
                                          "<<EOF",
                                          "EOF",
                                          "<",
                                          ">",
                                          ";",
                                          "&&",
                                          "|",
                                          "unset ",
                                          ":-",
                                          "NCCL_DEBUG",
                                          "=",
                                          "\r",
                                          "\t",
                                          std::string(1, '\0'),
                                          "\xff",
                                          "-u",
                                          "+="};
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (std::uint64_t i = random() % 24; i > 0; --i) text += parts[random() % parts.size()];
    const int lines = 1 + static_cast<int>(std::count(text.begin(), text.end(), '\n'));
    for (const Assignment& one : read_script(text)) {
      ASSERT_FALSE(one.name.empty());
      ASSERT_EQ(one.name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz0123456789"),
                std::string::npos);
      ASSERT_GE(one.line, 1);
      ASSERT_LE(one.line, lines) << text;
    }
  }
}

TEST(Script, IsNotBroughtDownByDepth) {
  std::string deep = "A=";
  for (int i = 0; i < 100000; ++i) deep += "${B:-";
  EXPECT_EQ(read_script(deep).size(), 1U);
  std::string nested(200000, '(');
  EXPECT_EQ(read_script("A=$" + nested).size(), 1U);
}

}  // namespace
}  // namespace oxytorch::environment
