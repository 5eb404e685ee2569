#include "comm/settings.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/environment.h"
#include "base/error.h"
#include "base/version.h"
#include "comm/machine.h"
#include "transport/ring/segment.h"

namespace pycoll {
namespace {

// Size of the header, which has the length of each text and the network cost as text.
constexpr size_t kHeaderBytes = 64;

std::string check_table(const std::string& text, const std::string& path, std::string& note) {
  const std::string again = "; `pycoll tune` makes a new one";
  try {
    const TuningTable table = TuningTable::parse(text);
    if (table.version != kVersion) {
      note = "ignored, " + path + " is of pycoll " + table.version + ", this is " +
             std::string(kVersion) + again;
    } else if (table.machine != machine_fingerprint()) {
      note = "ignored, " + path + " was measured on another machine (" + table.machine +
             "), this is (" + machine_fingerprint() + ")" + again;
    } else {
      note = path;
      return text;
    }
  } catch (const UsageError& error) {
    note = "ignored, " + path + " is damaged, " + error.what() + again;
  }
  return {};
}

}  // namespace

Settings Settings::read() {
  Settings settings;
  settings.rules = env_text(kRulesVariable).value_or("");
  settings.checks_data = env_flag("PYCOLL_CHECK_DATA");
  settings.tunes_online = env_flag("PYCOLL_ONLINE_TUNING");
  const std::string path = tuning_table_path();
  if (path.empty()) {
    settings.table_note = "none, neither PYCOLL_CACHE_DIR, XDG_CACHE_HOME nor HOME is set";
  } else {
    std::string text;
    // Leaves room for the rules and the note.
    const size_t room = Segment::kMaxSettingsText - 3 * 4096;
    const int error = read_file(path, room + 1, text);
    if (error == ENOENT) {
      settings.table_note = "none, `pycoll tune` makes " + path;
    } else if (error != 0) {
      settings.table_note = "ignored, cannot read " + path + ": " + std::strerror(error);
    } else if (text.size() > room) {
      settings.table_note =
          "ignored, " + path + " is longer than " + std::to_string(room) + " bytes";
    } else {
      settings.table = check_table(text, path, settings.table_note);
    }
  }
  // Rules that are too long are replaced by text that is not a rule, so that all ranks raise an
  // error.
  if (settings.rules.size() > 4096) settings.rules = "too long: more than 4096 characters";
  settings.table_note.resize(std::min<size_t>(settings.table_note.size(), 4096));
  return settings;
}

std::string Settings::to_bytes() const {
  char header[kHeaderBytes] = {};
  std::snprintf(header, sizeof(header), "%zu %zu %zu %.9g %.9g %d %d", rules.size(), table.size(),
                table_note.size(), network.alpha_s, network.beta_s_per_byte, checks_data ? 1 : 0,
                tunes_online ? 1 : 0);
  return std::string(header, sizeof(header)) + rules + table + table_note;
}

Settings Settings::from_bytes(std::string_view bytes) {
  Settings settings;
  size_t sizes[3] = {};
  int checks_data = 0;
  int tunes_online = 1;
  if (bytes.size() < kHeaderBytes ||
      std::sscanf(bytes.data(), "%zu %zu %zu %lf %lf %d %d", &sizes[0], &sizes[1], &sizes[2],
                  &settings.network.alpha_s, &settings.network.beta_s_per_byte, &checks_data,
                  &tunes_online) != 7 ||
      bytes.size() - kHeaderBytes != sizes[0] + sizes[1] + sizes[2]) {
    return settings;  // the world was made without settings
  }
  bytes.remove_prefix(kHeaderBytes);
  settings.checks_data = checks_data != 0;
  settings.tunes_online = tunes_online != 0;
  settings.rules = bytes.substr(0, sizes[0]);
  settings.table = bytes.substr(sizes[0], sizes[1]);
  settings.table_note = bytes.substr(sizes[0] + sizes[1]);
  return settings;
}

std::shared_ptr<const SelectionInputs> Settings::parse() const {
  auto inputs = std::make_shared<SelectionInputs>();
  inputs->rules = Rules::parse(rules, kRulesVariable);
  if (!table.empty()) inputs->table = TuningTable::parse(table);
  inputs->table_note = table_note;
  inputs->network = network;
  inputs->checks_data = checks_data;
  inputs->tunes_online = tunes_online;
  return inputs;
}

}  // namespace pycoll
