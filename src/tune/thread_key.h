/// The dispatch key by which one thread asks for operators of this library above all of torch's.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace oxytorch::tune {

/// Torch keeps it free for such use: nothing sees it but a thread that includes it. Above autocast and torch.func.
inline constexpr auto kThreadKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// The keys of a call behind it.
inline c10::DispatchKeySet behind_thread_key(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kThreadKey);
}

/// One more scope of a kind on this thread, which has `open` of them; whether the thread asked for nothing before.
inline bool open_scope(int& open) {
  const bool is_first = !c10::impl::tls_is_dispatch_key_included(kThreadKey);
  ++open;
  c10::impl::tls_set_dispatch_key_included(kThreadKey, true);
  return is_first;
}
inline void close_scope(int& open, bool is_first) {
  --open;
  if (is_first) c10::impl::tls_set_dispatch_key_included(kThreadKey, false);
}

/// Lets operators that nobody registered under the key fall through. Once for the process, never taken back.
void register_thread_key();

}  // namespace oxytorch::tune
