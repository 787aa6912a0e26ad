#include "oxytorch/tune/setting_lines.h"

#include <algorithm>

#include "base/spelling.h"
#include "oxytorch/tune/asked.h"
#include "tune/names.h"

namespace oxytorch::tune {
namespace {

std::string sentence(const std::string& text) { return text.empty() || text.ends_with('.') ? text : text + '.'; }

void append(std::string& text, const std::string& more) {
  if (!text.empty() && !more.empty()) text += ' ';
  text += more;
}

}  // namespace

std::string SettingLines::setting_of(const std::string& strategy) const {
  for (const auto& offer : offers) {
    if (offer.name == strategy) return std::string(tune::setting_of(strategy, offer.kind, offer.traits.group));
  }
  return "";
}

SettingLine SettingLines::active_as(const std::string& name, const std::vector<std::string>& strategies) const {
  SettingLine line{name, "on", ""};
  for (const auto& strategy : strategies) {
    std::string why = holds(required, strategy) ? "asked for." : "found by the run that is continued here.";
    for (const auto& entry : certificate.entries) {
      if (entry.strategy != strategy || entry.status != Status::Accepted) continue;
      why = sentence(entry.reason);
      if (entry.speedup && !line.gain) line.gain = entry.speedup->mid;
    }
    append(line.reason, std::string(strategy).append(": ").append(why));
    for (const auto& offer : offers) {
      if (offer.name == strategy) append(line.cost, sentence(offer.traits.cost));
    }
  }
  return line;
}

SettingLine SettingLines::of(const std::string& setting) const {
  std::vector<std::string> here;
  std::copy_if(active.begin(), active.end(), std::back_inserter(here),
               [&](const auto& name) { return setting_of(name) == setting; });
  const auto value = config.get(setting);
  const bool fp16 = value == ConfigValue(std::string("fp16"));
  if (setting == "precision" && (fp16 || (value == ConfigValue(std::string("bf16")) && !here.empty()))) {
    return {setting, "on", std::string(fp16 ? "fp16" : "bf16") + " autocast was asked for.",
            "products are rounded to 16 bits." + (slow.empty() ? "" : " Slow here: " + slow)};
  }
  if (!here.empty()) return active_as(setting, here);
  if (const auto why = refused.find(setting); why != refused.end()) return {setting, "refused", why->second};
  if (value != ConfigValue(std::string("auto"))) {
    return {setting, "off", to_string(value) + " was asked for (" + config.origin(setting) + ")."};
  }
  std::string tried;
  for (const auto& entry : certificate.entries) {
    if (setting_of(entry.strategy) == setting) append(tried, entry.strategy + ": " + sentence(entry.reason));
  }
  if (!tried.empty()) return {setting, "refused", tried};
  return {setting, "off", untried};
}

std::vector<SettingLine> SettingLines::beside_settings() const {
  std::vector<SettingLine> lines;
  for (const auto& name : active) {
    if (setting_of(name).empty()) lines.push_back(active_as(name, {name}));
  }
  return lines;
}

}  // namespace oxytorch::tune
