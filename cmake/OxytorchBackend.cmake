# oxytorch_add_backend(<name> SOURCE...): the loadable backend liboxytorch-backend-<name>.so as target
# oxytorch_backend_<name>. It needs oxytorch/backend.h alone and links nothing of Oxytorch.
#
# The headers come from Oxytorch::core where find_package(Oxytorch) or the source tree made it, otherwise from
# OXYTORCH_INCLUDE_DIR. Discovery finds the library in a directory named by OXYTORCH_BACKEND_PATH, or beside
# liboxytorch_core.so.
function(oxytorch_add_backend name)
  if(NOT name MATCHES "^[a-z0-9_-]+$")
    message(FATAL_ERROR "oxytorch_add_backend: '${name}' is no backend name; use lower case letters, digits, '-', '_'")
  endif()
  set(target oxytorch_backend_${name})
  add_library(${target} MODULE ${ARGN})
  set_target_properties(${target} PROPERTIES
    PREFIX "lib" OUTPUT_NAME "oxytorch-backend-${name}" SUFFIX ".so"
    C_VISIBILITY_PRESET hidden CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  if(TARGET Oxytorch::core)
    target_include_directories(${target} PRIVATE
      $<TARGET_PROPERTY:Oxytorch::core,INTERFACE_INCLUDE_DIRECTORIES>)
  elseif(OXYTORCH_INCLUDE_DIR)
    target_include_directories(${target} PRIVATE "${OXYTORCH_INCLUDE_DIR}")
  else()
    message(FATAL_ERROR "oxytorch_add_backend: call find_package(Oxytorch) first, or set OXYTORCH_INCLUDE_DIR")
  endif()
endfunction()
