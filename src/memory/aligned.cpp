#include "memory/aligned.h"

#include <algorithm>
#include <utility>

namespace oxytorch {

std::string aligned(std::vector<std::vector<std::string>> rows, std::size_t left) {
  std::vector<std::size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::vector<std::string> dashes;
  for (const auto width : widths) dashes.emplace_back(width, '-');
  rows.insert(rows.begin() + 1, std::move(dashes));
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      line += (i > 0 ? "  " : "") + (i < left ? row[i] + space : space + row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace oxytorch
